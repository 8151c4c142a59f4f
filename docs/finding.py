"""How others find the site: descriptions and previews of pages, llms.txt, a page for addresses that are not there.

The second hook of mkdocs, beside hooks.py. What needs the address of the site, which is made from the repository's, is
absent without it: canonical links, the picture of a preview, whole addresses in llms.txt.
"""

import html
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import address
from matplotlib.figure import Figure
from matplotlib.image import imread
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from twinattn.course import drawing
from twinattn.course.drawing.figure import as_image

PREVIEW = "assets/preview.png"
SEEN: dict[str, Any] = {}  # what one event leaves for a later one
IZE = re.compile(r"((?:de)?quanti|(?:de)?normali|materiali|initiali|optimi|seriali)([sz])(e[srd]?|ing|ation)")
LONGEST = 200  # characters of a description
NO_PARAGRAPH = re.compile(r"^(#|<|\||!|```|-|\d+\.|\?\?\?|:::|---|\$\$|    )")
# At any depth, and wherever the site is: all that is known are the names of what stands at its top. Where an address
# has none of them, the script asks from the top down which folder has the site's style. At the root of several
# versions, `versions` are their names, `shown` is the one to lead to from elsewhere, and `root` is where the root is,
# if that is known.
FIND_TOP = """<script>
(function (names, versions, shown, root) {
  var parts = location.pathname.split("/"), from = root ? root.split("/").length - 1 : 1;
  function place(known) {
    return parts.findIndex(function (part, i) { return i >= from && known.indexOf(part) >= 0; });
  }
  function asked() {
    for (var i = 1; i < parts.length - 1 && self.XMLHttpRequest; i++) {
      var request = new XMLHttpRequest();
      request.open("HEAD", parts.slice(0, i).join("/") + "/assets/site.css", false);
      try { request.send(); } catch (error) { break; }
      if (request.status === 200) return i;
    }
    return parts.length - 1;
  }
  var version = place(versions), at = place(names);
  var end = version >= 0 ? version + 1 : shown && root ? from : at >= 0 ? at : asked();
  var top = parts.slice(0, end).concat(version < 0 && shown ? [shown] : []).join("/") + "/";
  self.siteTop = top.replace(/["<>]/g, "");
  document.write('<base href="' + siteTop + '">');
})(%s);
</script>"""
OF_ONE_VERSION = ', [], "", ""'
TELL_TOP = """<script>
var config = document.getElementById("__config");
config.textContent = config.textContent.replace(/"base": "[^"]*"/, '"base": "' + siteTop + '"');
</script>"""


@event_priority(100)  # before plugins look at the address
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses; among versions beside one another, which mike makes, let the reader choose."""
    repository = address.repository()
    if repository:
        config.repo_url, config.site_url = repository, address.site(repository)
        config.repo_name = repository.partition("://")[2].partition("/")[2]
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the picture of previews."""
    files.append(File.generated(config, PREVIEW, content=preview(config.site_name, config.site_description)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Describe a page by its first paragraph, and let Colab open a notebook."""
    page.meta.setdefault("description", description(markdown) or config.site_description)
    source = page.file.src_uri
    is_notebook = source.startswith("notebooks/")
    opened = address.colab(address.repository(), f"{Path(source).stem}.ipynb") if is_notebook else ""
    if opened:
        title, _, rest = markdown.partition("\n")
        return f"{title}\n\n[Open in Colab]({opened}){{ .md-button }}\n{rest}"
    return markdown


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Put the Open Graph tags into a page, by which other sites show a preview of a link to it."""
    shown = {
        "og:type": "article",
        "og:site_name": config.site_name,
        "og:title": page.title or config.site_name,
        "og:description": page.meta["description"],
    }
    if config.site_url:
        shown |= {"og:url": page.canonical_url or "", "og:image": where(config) + PREVIEW}
        shown |= {"og:image:width": "1200", "og:image:height": "630", "twitter:card": "summary_large_image"}
    tags = "\n".join(f'<meta property="{name}" content="{html.escape(text)}">' for name, text in shown.items())
    return output.replace("</head>", f"{tags}\n</head>", 1)


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Make the style and the links of the 404 page work wherever the site is."""
    if template_name != "404.html":
        return output_content
    root = re.sub(r"^https?://[^/]+", "", where(config) or "/")
    relative = re.sub(rf'((?:href|src|data-base|action)="){re.escape(root)}', r"\1./", output_content)
    relative = re.sub(r'(<script id="__config".*?</script>)', rf"\1\n{TELL_TOP}", relative, flags=re.DOTALL)
    names = sorted(SEEN["top"] | {"assets", "search"})
    return relative.replace("<head>", f"<head>\n{FIND_TOP % (json.dumps(names) + OF_ONE_VERSION)}", 1)


def at_root(page: str, versions: Sequence[str], shown: str, root: str = "") -> str:
    """Make the page of wrong addresses of one version that of all: Pages shows the one at the root, whatever is asked.

    Args:
        page: as it was built for the version `shown`.
        versions: the names of all, aliases included.
        shown: where links lead if what is asked names no version.
        root: the path of the root, which ends in a slash; empty if it is not known.

    Raises:
        ValueError: if the page is not one that `on_post_template` made.
    """
    if page.count(OF_ONE_VERSION) != 1:
        raise ValueError("page: expected the 404.html of one version")
    return page.replace(OF_ONE_VERSION, f", {json.dumps(list(versions))}, {json.dumps(shown)}, {json.dumps(root)}")


def on_nav(nav: Navigation, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Remember the navigation for llms.txt, and the folders for the page of wrong addresses."""
    SEEN.update(nav=nav, top={file.dest_uri.split("/")[0] for file in files if "/" in file.dest_uri})
    return nav


@event_priority(-50)  # after search has written its index, before offline makes a script of it
def on_post_build(*, config: MkDocsConfig) -> None:
    """Write llms.txt, and let the search find identifiers by their parts, too."""
    folder = Path(config.site_dir)
    (folder / "llms.txt").write_text(llms(SEEN["nav"], config), encoding="utf-8")
    file = folder / "search/search_index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        said = f"{entry['title']} {entry['text']}"
        entry["text"] += "".join(f"\n<p>{words}</p>" for words in (parts(said), spellings(said)) if words)
    file.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def where(config: MkDocsConfig) -> str:
    """Return the address of the site, which ends in a slash, or nothing; mike appends a version without one."""
    return f"{config.site_url.rstrip('/')}/" if config.site_url else ""


def llms(nav: Navigation, config: MkDocsConfig) -> str:
    """List all pages for programs that read, with what each says first. Source: https://llmstxt.org."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]

    def add(items: list) -> None:
        for item in items:
            if isinstance(item, Section):
                lines.extend(["", f"## {item.title}", ""])
                add(item.children)
            elif isinstance(item, Page):
                lines.append(f"- [{item.title}]({where(config)}{item.url}): {item.meta['description']}")

    pages, sections = ([item for item in nav.items if isinstance(item, kind)] for kind in (Page, Section))
    lines.append("")
    add(pages)
    add(sections)
    return "\n".join(lines) + "\n"


def parts(text: str) -> str:
    """Return the parts of identifiers in a text, `slot mapping` of `slot_mapping`, less those that are words of it."""
    words = set(re.findall(r"\w+", re.sub(r"<[^>]+>", " ", text).lower()))
    found = {part for word in words if "_" in word.strip("_") for part in word.split("_") if len(part) > 1}
    return " ".join(sorted(found - words))


def spellings(text: str) -> str:
    """Return the other spelling of words in a text, `quantised` of `quantized`, less those that are words of it."""
    words = set(re.findall(r"[a-z]+", re.sub(r"<[^>]+>", " ", text).lower()))
    other = {"s": "z", "z": "s"}
    found = {f"{match[1]}{other[match[2]]}{match[3]}" for match in map(IZE.fullmatch, words) if match}
    return " ".join(sorted(found - words))


def description(markdown: str) -> str:
    """Return the first paragraph of a page, as text without marks, cut at a word."""
    for paragraph in re.split(r"\n\s*\n", markdown):
        if NO_PARAGRAPH.match(paragraph):
            continue
        text = " ".join(re.sub(r"^> ?", "", paragraph, flags=re.MULTILINE).split())
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"<[^>]+>|[*`$]|\{[^}]*\}", "", text).strip()
        if text:
            return text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(' ')[0]} …"
    return ""


def preview(name: str, says: str) -> bytes:
    """Draw 1200 x 630 pixels: the name, what it is, and who sees whom."""
    shown = drawing.example("causal")
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    figure.text(0.06, 0.8, name, size=52, weight="bold")
    figure.text(0.06, 0.7, says, size=17)
    axes = figure.add_axes((0.06, 0.06, 0.88, 0.56))
    axes.imshow(imread(io.BytesIO(as_image(shown.lines, shown.note, "png"))))
    axes.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
