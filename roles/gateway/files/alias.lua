-- Writes an upstream's own name of a model in place of the one that the client used. Loaded by HAProxy (lua-load-per-thread)
-- where there are external upstreams, and used in their backends alone.
--
-- The body is there whole (wait-for-body), and model.lua noted where in it the name stands: txn.model_at and txn.model_size, in
-- bytes. The configuration sets Content-Length by the difference. A body that comes in parts all the same is not sent on.

local Alias = { id = 'alias', flags = filter.FLT_CFG_FL_HTX }
Alias.__index = Alias

function Alias:new()
  return setmetatable({}, Alias)
end

function Alias:start_analyze(_, channel)
  if not channel:is_resp() then filter.register_data_filter(self, channel) end
end

function Alias:http_payload(txn, message)
  if self.written then return end
  local at, size = txn:get_var('txn.model_at'), txn:get_var('txn.model_size')
  local name = txn:get_var('txn.alias')
  if not at or not size or not name or message:input() < at + size then error('the body is not there whole') end
  message:set(name, at, size)
  self.written = true
end

core.register_filter('alias', Alias, function(made) return made end)
