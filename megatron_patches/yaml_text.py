"""YAML as people mean it: 2e-3 is a number, as in JSON and YAML 1.2, and a mapping names every key once."""

import re
from typing import Any

import yaml

# YAML 1.1, which PyYAML reads, wants a point in the mantissa and a sign in the exponent, and takes anything else for text.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


def parse(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML, or a mapping names a key twice.
    """
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, key in enumerate(keys):
            if key.value in (other.value for other in keys[:place]):
                fault = f"the key {key.value!r} appears twice; keep one"
                raise yaml.composer.ComposerError(problem=fault, problem_mark=key.start_mark)
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
