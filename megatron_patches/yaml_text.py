"""YAML whose mappings name every key once, and in which 2e-3 is a number, as in JSON and YAML 1.2."""

import re
from typing import Any

import yaml

# YAML 1.1, which PyYAML reads, wants a point in the mantissa and a sign in the exponent, and takes anything else for text.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")

MERGE = "tag:yaml.org,2002:merge"


def parse(text: str) -> Any:
    """What a YAML text says.

    Raises:
        ValueError: in one line, that it is no YAML, or that a mapping names a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, " if mark else ""
        raise ValueError(f"is not YAML: {line}{error.problem or error.context}") from None
    except Exception as error:  # what PyYAML lets through from the values it makes, a date of month 13 for example
        raise ValueError(f"is not YAML: {' '.join(f'{type(error).__name__}: {error}'.split())}") from None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        for place, key in enumerate(keys):
            if any((key.tag, key.value) == (other.tag, other.value) for other in keys[:place]):
                fault = f"the key {key.value!r} appears twice; keep one"
                raise yaml.composer.ComposerError(problem=fault, problem_mark=key.start_mark)
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
