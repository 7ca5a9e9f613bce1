"""How `ds-basisrot` refuses: exit code 2 and one line on stderr."""

from ds_basisrot.cli import main


def refusal(capsys, *arguments) -> str:
    """The one line on stderr with which `ds-basisrot` refuses `arguments`."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    (line,) = output.err.splitlines()
    return line
