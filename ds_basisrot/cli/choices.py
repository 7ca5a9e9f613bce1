"""Names that a user chose from a list, separated by commas."""

from collections.abc import Sequence

from ds_basisrot.cli.errors import CommandError


def chosen(option: str, kind: str, text: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that `text` has, in any letter case, in its order and each once.

    Args:
        option: where the text was given, such as "--only".
        kind: what the names stand for, in the singular.

    Raises:
        CommandError: a name that does not exist, or none at all.
    """
    from ds_basisrot.optim.options import closest  # here: the other commands need not wait for it

    by_lower_case, result = {name.lower(): name for name in names}, []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.lower() not in by_lower_case:
            raise CommandError(f"{option}: unknown {kind} {name!r}; {closest(name, list(names))}")
        result.append(by_lower_case[name.lower()])
    if not result:
        raise CommandError(f"{option}: names no {kind}; valid: {', '.join(names)}")
    return list(dict.fromkeys(result))
