"""A hook of mkdocs: adds the pages that are made of other files, so that nothing is written twice.

    index.md, design.md, security-policy.md, ...   README.md, DESIGN.md, SECURITY.md, ... of the repository
    reference/cli.md                        the commands, from typer
    reference/settings.md                   PACELINE_* variables and `paceline.Config`

Links lead to pages of the site where there is one, else to the file on GitHub. What is read as Markdown on GitHub, and
what the site needs, differ in a few ways that are evened out here, such as words in a fence that only tests read. Pages
with diagrams load mermaid from the site. At the end the site is searched for anything that a browser would fetch from
elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from reference import command_line, settings  # noqa: E402

GITHUB = "https://github.com/paceline/paceline"
RAW = "https://raw.githubusercontent.com/paceline/paceline/main/"
FROM_ROOT = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "SECURITY.md": "security-policy.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
}
FENCE = re.compile(r"^```(\w+)((?: (?:torch|fails|unordered|whole|fragment|output))+)(.*)$", re.MULTILINE)
MERMAID = "assets/mermaid.js"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LIST = re.compile(r"^(?!\s|[-*] |\d+\. |#|\||>|`{3}|$)(.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages that are made of files elsewhere."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    files.append(File.generated(config, "reference/settings.md", content=settings()))
    mermaid = distribution("mermaidx").locate_file(f"mermaidx/{MERMAID}")  # mermaid's own file, as published on npm
    files.append(File.generated(config, MERMAID, abs_src_path=str(mermaid)))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Names every decision in the navigation, below their index."""
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    for section in config.nav or []:
        for entry in section.get("Design", []) if isinstance(section.get("Design"), list) else []:
            if "Decisions" in entry:
                entry["Decisions"] = ["decisions/README.md", *(f"decisions/{name}" for name in decisions)]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links and fences of one page."""
    here = page.file.src_uri
    source = next((path for path, uri in FROM_ROOT.items() if uri == here), f"docs/{here}")
    markdown = FENCE.sub(r"```\1\3", markdown)
    parts = FENCED.split(markdown)  # a list or a fence needs no empty line before or behind it on GitHub
    parts[::2] = [LIST.sub(r"\1\n\n", part) for part in parts[::2]]
    parts[1::2] = [f"\n{fence}\n" for fence in parts[1::2]]
    markdown = "".join(parts)
    kept = CODE.findall(markdown)
    rest = CODE.split(markdown)
    found = [LINK.sub(lambda m: f"{m[1]}{_target(m[2], source, here, files)}{m[3]}", part) for part in rest]
    return "".join(text for pair in zip(found, [*kept, ""], strict=True) for text in pair)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Lets a page with diagrams load mermaid, 3.5 MB; fails if a browser would fetch something from elsewhere."""
    if '<pre class="mermaid">' in output:  # else the theme would fetch it from elsewhere
        output = output.replace("</head>", f'<script src="{get_relative_url(MERMAID, page.url)}"></script></head>')
    loads = re.findall(r'<(?:script|img|iframe|source)[^>]* src="?(https?:[^" >]*)', output)
    loads += re.findall(r'<link[^>]* rel="?(?:stylesheet|preconnect|icon)"?[^>]* href="?(https?:[^" >]*)', output)
    if loads:
        raise PluginError(f"{page.file.src_uri} needs {loads[0]}: the site must work offline")
    return output


def _target(link: str, source: str, here: str, files: Files) -> str:
    """Returns where a link leads from the page `here`, which is the file `source` of the repository."""
    address, hash_, anchor = link.partition("#")
    for prefix in (f"{GITHUB}/blob/main/", f"{GITHUB}/tree/main/", RAW):
        if address.startswith(prefix):
            path = address.removeprefix(prefix)
            break
    else:
        if not address or re.match(r"[a-z]+:", address):
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
    page = FROM_ROOT.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if page and files.get_file_from_path(page) is not None:
        return posixpath.relpath(page, posixpath.dirname(here) or ".") + hash_ + anchor
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {link}, which is not there")
    return f"{GITHUB}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{hash_}{anchor}"
