"""Builds the training and held-out text from Debian packages.

    python model/training/corpus.py --packages DEBS --out DATA [--download]

DEBS holds the .deb files (`--download` fetches the missing ones with `apt-get download`).
DATA receives train.txt (documents separated by NUL), held_out.txt and sources.json.
"""

import argparse
import gzip
import hashlib
import json
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from markup import strip_html, tidy
from sources import HELD_OUT, TRAINING, Source

HTML = frozenset({".html", ".htm", ".xhtml"})
PLAIN = frozenset({".txt", ".rst", ".md", ".py", ".go"})
SKIP_ALWAYS = ("/_sources/", "/_static/", "genindex", "/search.", "changelog", "copyright", "/_modules/", "py-modindex")
MIN_CHARS, MAX_CHARS = 400, 400_000
HELD_OUT_BYTES = 1_500_000


def find_deb(folder: Path, package: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{package}_*.deb"), reverse=True)), None)


def download(folder: Path, sources: Iterable[Source]) -> None:
    missing = [s.package for s in sources if find_deb(folder, s.package) is None]
    folder.mkdir(parents=True, exist_ok=True)
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)


def page_text(path: Path) -> str | None:
    """Plain text of one file, or None when it is not documentation or not UTF-8."""
    suffixes = [s for s in path.suffixes if s != ".gz"]
    kind = suffixes[-1].lower() if suffixes else ""
    if kind not in HTML | PLAIN:
        return None
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = strip_html(text) if kind in HTML else tidy(text)
    return text if len(text) >= MIN_CHARS else None


def without_boilerplate(pages: list[str]) -> Iterator[str]:
    """Drop lines that stand on more than a fifth of a package's pages (menus, footers)."""
    seen = Counter(line for page in pages for line in set(page.split("\n")) if line)
    limit = max(10, len(pages) // 5)
    for page in pages:
        kept = "\n".join(line for line in page.split("\n") if not line or line.startswith(" ") or seen[line] <= limit)
        if len(kept) >= MIN_CHARS:
            yield kept[:MAX_CHARS]


def read_package(source: Source, folder: Path) -> list[str]:
    """Return the documents of a package in a seeded order, at most `cap_mb` of them, each once."""
    deb = find_deb(folder, source.package)
    if deb is None:
        raise FileNotFoundError(f"{source.package}: no .deb in {folder} (use --download)")
    unpacked = Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        subprocess.run(["dpkg", "-x", str(deb), str(unpacked)], check=True)
        paths = sorted(p for p in unpacked.rglob("*") if p.is_file() and not p.is_symlink())
        skip = SKIP_ALWAYS + source.skip
        pages = [page_text(p) for p in paths if not any(part in str(p) for part in skip)]
    finally:
        shutil.rmtree(unpacked)
    unique = {hashlib.sha256(page.encode()).digest(): page for page in pages if page}
    documents = list(without_boilerplate(list(unique.values())))
    random.Random(source.package).shuffle(documents)
    budget, kept = source.cap_mb * 1_000_000, []
    for document in documents:
        budget -= len(document.encode())
        if budget < 0:
            break
        kept.append(document)
    return kept


def write_corpus(packages: Path, out: Path, workers: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    sources = TRAINING + HELD_OUT
    with ProcessPoolExecutor(workers) as pool:
        documents = dict(zip(sources, pool.map(partial(read_package, folder=packages), sources), strict=True))
    held_out = "\n".join(doc for source in HELD_OUT for doc in documents[source]).encode()
    (out / "held_out.txt").write_bytes(held_out[:HELD_OUT_BYTES].decode(errors="ignore").encode())
    train = [doc for source in TRAINING for doc in documents[source]]
    random.Random(0).shuffle(train)
    (out / "train.txt").write_text("\0".join(train))
    report = [
        {
            "package": getattr(find_deb(packages, s.package), "name", ""),
            "licence": s.licence,
            "held_out": s in HELD_OUT,
            "documents": len(docs),
            "bytes": sum(len(d.encode()) for d in docs),
        }
        for s, docs in documents.items()
    ]
    (out / "sources.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the training text from Debian packages.")
    parser.add_argument("--packages", type=Path, required=True, help="folder of .deb files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--download", action="store_true", help="fetch missing packages with apt-get download")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.download:
        download(args.packages, TRAINING + HELD_OUT)
    write_corpus(args.packages, args.out, args.workers)


if __name__ == "__main__":
    main()
