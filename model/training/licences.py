"""Compares the listed licences with what the packages themselves say; prints what a reader has to judge.

    python model/training/licences.py --packages DEBS

Two sources are read: the package's Debian copyright file (its paragraphs for all files and for documentation) and
every page that the corpus would take, for sentences that put the page under share-alike or copyleft terms.
"""

import argparse
import gzip
import re
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from corpus import HTML, PLAIN, SKIP_ALWAYS, find_deb
from markup import strip_html
from sources import HELD_OUT, TRAINING, Source

_FIELD = re.compile(r"^(Files|License):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)
_CLAIM = re.compile(
    r"creativecommons\.org/licenses/by-[a-z-]+/[0-9.]+|CC[- ]BY[- ](?:SA|NC|ND)\b"
    r"|Attribution[- ](?:ShareAlike|NonCommercial|NoDerivs)|GNU Free Documentation License"
    r"|(?:redistribute|distributed|licen[cs]ed)\b[^.]{0,120}"
    r"\b(?:GNU (?:Lesser |Library |Affero )?General Public|[AL]?GPL\b)",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Found:
    """What a package says about its licence."""

    copyright: str = ""
    link: str = ""  # the package whose documentation folder this one shares, when it has none of its own
    claims: list[tuple[str, str]] = field(default_factory=list)  # (page, passage), each once


def stated(copyright_text: str) -> list[tuple[str, str]]:
    """Return (files, licence) of the paragraphs for all files and for documentation of a Debian copyright file."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", copyright_text):
        fields = dict(_FIELD.findall(paragraph))
        if {"Files", "License"} <= fields.keys():
            patterns = fields["Files"].split()
            if "*" in patterns or any(re.match(r"(?:\./)?(?:docs?|man)\b", pattern) for pattern in patterns):
                found.append((" ".join(patterns), fields["License"].split("\n")[0].strip()))
    return found


def claims(text: str) -> list[str]:
    """Return the passages about share-alike or copyleft terms; a reader decides which of them mean this text."""
    return [" ".join(match.group().split()) for match in _CLAIM.finditer(text)]


def read_package(source: Source, deb: Path) -> Found:
    found = Found()
    folder = f"./usr/share/doc/{source.package}"
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.name == folder and member.issym():
                found.link = member.linkname
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is None:
                continue
            if member.name == f"{folder}/copyright":
                found.copyright = stream.read().decode(errors="replace")
            elif is_page(member.name, source):
                found.claims += [(member.name, claim) for claim in page_claims(member.name, stream.read())]
    return found


def is_page(name: str, source: Source) -> bool:
    suffixes = [suffix for suffix in Path(name).suffixes if suffix != ".gz"]
    kind = suffixes[-1].lower() if suffixes else ""
    return kind in HTML | PLAIN and not any(part in name for part in SKIP_ALWAYS + source.skip)


def page_claims(name: str, raw: bytes) -> list[str]:
    """Return what a page claims, each once; footers count too, which the corpus drops."""
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode(errors="replace")
    stripped = strip_html(text) if Path(name.removesuffix(".gz")).suffix.lower() in HTML else ""
    return sorted(set(claims(text)) | set(claims(stripped)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the listed licences with the packages' own words.")
    parser.add_argument("--packages", type=Path, required=True, help="folder of .deb files")
    parser.add_argument("--only", nargs="*", help="these packages; default: all")
    args = parser.parse_args()
    for source in TRAINING + HELD_OUT:
        if args.only and source.package not in args.only:
            continue
        deb = find_deb(args.packages, source.package)
        if deb is None:
            print(f"{source.package}: no .deb in {args.packages}")
            continue
        found = read_package(source, deb)
        print(f"{source.package}: listed {source.licence}", flush=True)
        if not found.copyright:
            print(f"    no copyright file of its own; shared with {found.link or 'nobody'}")
        for files, licence in stated(found.copyright):
            print(f"    {files[:80]}: {licence}")
        for name, claim in found.claims:
            print(f"    in {name}: {claim[:160]}")


if __name__ == "__main__":
    main()
