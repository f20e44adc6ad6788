"""For this scenario: what dpkg did between two looks, and what a driver's plan shows, in one form."""


def dpkg_changes(before, after):
    """What became of the packages: name to [old, new], of lines `name version state`."""
    old, new = _installed(before), _installed(after)
    return {name: [old.get(name), new.get(name)] for name in sorted({*old, *new}) if old.get(name) != new.get(name)}


def shown_changes(changes):
    """The same of what the plan shows (see filter driver_plan)."""
    found = {name: [None, version] for name, version in {**changes["install"], **changes["along"]}.items()}
    found.update(changes["upgrade"])
    found.update({name: [version, None] for name, version in changes["remove"].items()})
    return dict(sorted(found.items()))


def _installed(lines):
    words = [line.split() for line in lines]
    return {name.removesuffix(":amd64"): version for name, version, state in words if state == "installed"}


class FilterModule:
    def filters(self):
        return {"dpkg_changes": dpkg_changes, "shown_changes": shown_changes}
