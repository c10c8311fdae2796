"""Whether arguments fit a function tool's declared schema, for the part of JSON Schema that strict tools use.

Understood: `type`, `properties`, `required`, `additionalProperties`, `items`, `enum`, `const`, `anyOf`, and
`$ref` into the same schema's `$defs`. Other keywords bound values within their types and are not judged here.
"""

from typing import Any, Final

import orjson

_MAX_DEPTH: Final = 64


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value fits; a schema nested deeper than any real one fits nothing."""
    return _fits(value, schema, schema, _MAX_DEPTH)


def _fits(value: Any, schema: Any, root: dict[str, Any], depth: int) -> bool:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict) or depth == 0:
        return False
    if "$ref" in schema:
        return _fits(value, _resolved(schema["$ref"], root), root, depth - 1)
    return (
        _has_type(value, schema)
        and _is_listed(value, schema)
        and ("anyOf" not in schema or any(_fits(value, item, root, depth - 1) for item in schema["anyOf"]))
        and (not isinstance(value, dict) or _object_fits(value, schema, root, depth))
        and (not isinstance(value, list) or all(_fits(v, schema.get("items", True), root, depth - 1) for v in value))
    )


def _resolved(reference: Any, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in str(reference).removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _object_fits(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], depth: int) -> bool:
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", ())) and all(
        _fits(item, properties.get(name, rest), root, depth - 1) for name, item in value.items()
    )


def _is_listed(value: Any, schema: dict[str, Any]) -> bool:
    if "const" in schema and not same_json(value, schema["const"]):
        return False
    return "enum" not in schema or any(same_json(value, item) for item in schema["enum"])


def _has_type(value: Any, schema: dict[str, Any]) -> bool:
    wanted = schema.get("type")
    if wanted is None:
        return True
    return any(_is_a(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted))


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "object": dict,
        "array": list,
        "null": type(None),
    }
    return isinstance(value, kinds.get(name, ()))


def same_json(left: Any, right: Any) -> bool:
    """Equal as JSON: `1` is `1.0` but not `true`; the order of an object's names means nothing."""
    return canonical(left) == canonical(right)


def canonical(value: Any) -> bytes:
    """One form for all values that are equal as JSON."""
    return orjson.dumps(_plain(value), option=orjson.OPT_SORT_KEYS)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value
