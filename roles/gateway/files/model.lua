-- Reads `model` out of a JSON request body, for routing. Loaded by HAProxy (lua-load-per-thread).
--
-- HAProxy's own json_query takes the first of two `model`, Python's parser, which vLLM uses, the last. Here two are refused,
-- and so is everything that the two might read in two ways: escaped names, another encoding than UTF-8, a byte order mark,
-- text after the object. What is inside of values is skipped unread, whatever it holds.
--
-- Sets txn.model, with its place in the body (txn.model_at, from 0, and txn.model_size, in bytes, as it is written there), or
-- txn.fault to one of: json, missing, type, twice. Strings are found by patterns of the C library, so that
-- a body of 4 MiB takes some tens of milliseconds; HAProxy interrupts an action that takes long (tune.lua.forced-yield).

-- More strings and brackets than this inside of values are no request of anybody who wants an answer.
local MOST = 200000

-- Index of the quote that ends the string whose first character stands at `at`; nil where it never ends.
local function string_end(text, at)
  while true do
    local hit = text:find('"', at, true)
    if not hit then return nil end
    local before = hit - 1
    while text:byte(before) == 92 do before = before - 1 end
    if (hit - before) % 2 == 1 then return hit end
    at = hit + 1
  end
end

-- Index after the array or object whose first character stands at `at`.
local function nested_end(text, at)
  local depth = 0
  for _ = 1, MOST do
    local hit = text:find('["{}%[%]]', at)
    if not hit then return nil end
    local sign = text:byte(hit)
    at = hit + 1
    if sign == 34 then
      at = string_end(text, at)
      if not at then return nil end
      at = at + 1
    elseif sign == 123 or sign == 91 then
      depth = depth + 1
    else
      depth = depth - 1
      if depth == 0 then return at end
    end
  end
end

local function blank_end(text, at)
  return text:find('[^ \t\r\n]', at)
end

-- Some encoders write org\/name, and any character may be written as its number. Names of models are plain ASCII, so that
-- what else is escaped is no known name, and stays as it is.
local function plain(text)
  if not text:find('\\', 1, true) then return text end
  text = text:gsub('\\u00([2-7]%x)', function(digits)
    local sign = string.char(tonumber(digits, 16))
    return sign:find('[%w._:/-]') and sign or nil
  end)
  return (text:gsub('\\/', '/'))
end

-- The model that a body names, nil, and where its text begins and how many bytes it has there; or nil and the fault.
local function model_of(text)
  local at = blank_end(text, 1)
  if not at or text:byte(at) ~= 123 then return nil, 'json' end
  at = blank_end(text, at + 1)
  if not at then return nil, 'json' end
  local model, place, size
  if text:byte(at) ~= 125 then
    while true do
      if text:byte(at) ~= 34 then return nil, 'json' end
      local last = string_end(text, at + 1)
      if not last or last - at > 200 then return nil, 'json' end
      local name = text:sub(at + 1, last - 1)
      if name:find('\\', 1, true) then return nil, 'json' end
      at = blank_end(text, last + 1)
      if not at or text:byte(at) ~= 58 then return nil, 'json' end
      at = blank_end(text, at + 1)
      if not at then return nil, 'json' end
      local sign, first = text:byte(at), at
      if sign == 34 then
        last = string_end(text, at + 1)
        if not last then return nil, 'json' end
        at = last + 1
      elseif sign == 123 or sign == 91 then
        at = nested_end(text, at)
      else
        _, last = text:find('^[%w+.-]+', at)
        at = last and last + 1
      end
      if not at then return nil, 'json' end
      if name == 'model' then
        if model then return nil, 'twice' end
        if sign ~= 34 then return nil, 'type' end
        if at - first > 512 then return nil, 'type' end
        model, place, size = plain(text:sub(first + 1, at - 2)), first, at - 2 - first
      end
      at = blank_end(text, at)
      if not at then return nil, 'json' end
      sign = text:byte(at)
      if sign == 125 then break end
      if sign ~= 44 then return nil, 'json' end
      at = blank_end(text, at + 1)
      if not at then return nil, 'json' end
    end
  end
  if blank_end(text, at + 1) then return nil, 'json' end
  if not model then return nil, 'missing' end
  return model, nil, place, size
end

if core then
  core.register_action('read_model', { 'http-req' }, function(txn)
    local model, fault, place, size = model_of(txn.f:req_body() or '')
    if model then
      txn:set_var('txn.model', model)
      txn:set_var('txn.model_at', place)
      txn:set_var('txn.model_size', size)
    else
      txn:set_var('txn.fault', fault)
    end
  end, 0)
else
  return model_of
end
