"""/docs without outside scripts (--enable-offline-docs): the OpenAPI document as one plain page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}code{font-family:ui-monospace,monospace}"
    "td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}"
    "details{margin:.3rem 0}summary{cursor:pointer}"
)


def page(document: Json) -> str:
    """The page of a document."""
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    routes = "\n".join(_routes(document))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>Every route, and the fields of its body. The same for programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>\n{routes}</html>'
    )


def _routes(document: Json) -> Iterator[str]:
    for path, methods in sorted(document["paths"].items()):
        for method, route in methods.items():
            name = f"<code>{method.upper()} {html.escape(path)}</code>"
            about = html.escape(route.get("description") or route.get("summary", ""))
            bodies = "".join(_body(document, route))
            yield f"<details><summary>{name} {about}</summary>{bodies}</details>"


def _body(document: Json, route: Json) -> Iterator[str]:
    for content in route.get("requestBody", {}).get("content", {}).values():
        for schema in content["schema"].get("anyOf", [content["schema"]]):
            found = _resolved(document, schema)
            needed = found.get("required", [])
            rows = "".join(
                _row(document, name, field, is_needed=name in needed)
                for name, field in found.get("properties", {}).items()
            )
            yield f"<h3>{html.escape(found.get('title', 'body'))}</h3><table>{rows}</table>"


def _row(document: Json, name: str, field: Json, *, is_needed: bool) -> str:
    kind = html.escape(_kind(document, field))
    about = html.escape(field.get("description", ""))
    mark = " (required)" if is_needed else ""
    return f"<tr><td><code>{html.escape(name)}</code>{mark}<td>{kind}<td>{about}"


def _kind(document: Json, field: Json) -> str:
    if "anyOf" in field:
        kinds = [_kind(document, one) for one in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        return str(_resolved(document, field).get("title", "object"))
    if field.get("type") == "array":
        return f"list of {_kind(document, field.get('items', {}))}"
    return str(field.get("type", "anything"))


def _resolved(document: Json, schema: Json) -> Json:
    if "$ref" not in schema:
        return schema
    found: Json = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found
