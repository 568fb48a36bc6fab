"""List the files of a working directory that are the job's code, without ignored files and likely secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec, RegexPattern

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.git import git
from launcher.schedulers.over_ssh.secret_names import looks_secret

LAUNCHERIGNORE = ".launcherignore"
"Same syntax as .gitignore. Files that it names are not sent, even if git tracks them."
GITIGNORE = ".gitignore"
PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")
"Without git, the nearest folder with one of these is the project, whose ignore files are read."
_SLASH = "ps_d"
"pathspec's group for the slash after a folder that a pattern has matched."


class SnapshotError(SchedulerError):
    """The working directory cannot be sent; the message names the files."""


def code_files(
    workdir: Path, send: Sequence[str] = (), secret: Sequence[Path] = ()
) -> tuple[list[str], list[str]]:
    """Return the files of the code, and the files that are left out because they are or look secret.

    `send` holds patterns of files that are sent anyway; `secret` holds files with values of the job's
    secrets. Raises SnapshotError, OSError.
    """
    wanted = {path for pattern in send for path in _matching(workdir, pattern)}
    launcherignore = IgnoreFiles(workdir, LAUNCHERIGNORE)
    listed = sorted({path for path in _not_ignored(workdir) if not launcherignore.ignore(path)} - wanted)
    held_back = {
        path
        for path in listed
        if os.path.lexists(workdir / path)
        and (_is_one_of(workdir / path, secret) or looks_secret(workdir, path))
    }
    return sorted({*listed, *wanted} - held_back), sorted(held_back)


def project_root(workdir: Path) -> Path:
    """Return the root of the repository or project that the folder belongs to, or the folder itself."""
    folders = [(real := workdir.resolve()), *real.parents]
    repository = (folder for folder in folders if (folder / ".git").exists())
    project = (folder for folder in folders if any((folder / name).is_file() for name in PROJECT))
    return next(repository, None) or next(project, real)


class IgnoreFiles:
    """The ignore files of one name in a project. Each applies to everything below its folder.

    If the ignore files above the working directory ignore it as a whole, they are disregarded: the user has
    chosen to work there anyway.
    """

    def __init__(self, workdir: Path, name: str) -> None:
        self.name = name
        self._begin(project_root(workdir))
        within = workdir.resolve().relative_to(self.top)
        self._within = "" if within == Path() else f"{within}/"
        if self._ignore(self._within):
            self._begin(workdir)
            self._within = ""

    def _begin(self, top: Path) -> None:
        self.top = top
        self._read: dict[str, Sequence[RegexPattern]] = {}
        self._ignored = {"": False}

    def ignore(self, path: str) -> bool:
        """Return whether `path`, relative to the working directory, or a folder above it is ignored.

        A folder's path ends in a slash. Raises SnapshotError, OSError.
        """
        return self._ignore(self._within + path)

    def _ignore(self, path: str) -> bool:
        if path not in self._ignored:
            folder, _, _ = path.rstrip("/").rpartition("/")
            ignored = self._ignore(f"{folder}/" if folder else "") or self._named(path)
            if not path.endswith("/"):
                return ignored
            self._ignored[path] = ignored
        return self._ignored[path]

    def _named(self, path: str) -> bool:
        """Return whether a pattern ignores the path itself. The innermost file with a match decides."""
        for folder in PurePosixPath(path).parents:
            folder_prefix = "" if folder.name == "" else f"{folder}/"
            for pattern in self._patterns(folder_prefix):
                if pattern.include is not None and _matches(pattern, path[len(folder_prefix) :]):
                    return pattern.include
        return False

    def _patterns(self, folder: str) -> Sequence[RegexPattern]:
        """Return the folder's patterns in reverse order, because the last match decides."""
        if folder not in self._read:
            self._read[folder] = _patterns_of(self.top / folder / self.name)[::-1]
        return self._read[folder]


def _matches(pattern: RegexPattern, path: str) -> bool:
    """Return whether a pattern matches the path itself.

    pathspec also matches everything below a matched folder; git does not. The difference matters if a later
    pattern re-includes the folder.
    """
    if pattern.regex is None:
        return False
    if _SLASH not in pattern.regex.groupindex:  # such as `sub/**`, which means what is below the folder
        return pattern.regex.search(path.removesuffix("/")) is not None
    # The second search is for patterns such as `*/`, because pathspec lets their slash match anywhere.
    for match in (pattern.regex.search(path), pattern.regex.search(path, len(path) - 1)):
        if match and match.end(_SLASH) in (-1, len(path)):  # -1: the pattern needed no slash
            return True
    return False


def _patterns_of(file: Path) -> list[RegexPattern]:
    """Parse an ignore file. Raises SnapshotError, OSError."""
    try:
        text = os.fsdecode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return []
    patterns: list[RegexPattern] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            patterns += GitIgnoreSpec.from_lines([line.removesuffix("\r")]).patterns
        except ValueError as error:
            raise SnapshotError(f"{file}:{number}: {line!r} is not a pattern: {error}") from None
    return patterns


def _matching(workdir: Path, pattern: str) -> Iterator[str]:
    """Yield the files of a `send:` entry, even if they are ignored. Raises SnapshotError."""
    paths = list(workdir.glob(pattern))
    if not paths:
        raise SnapshotError(f"send: there is no {pattern} in {workdir}")
    for path in paths:
        below = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        is_folder = path.is_dir() and not path.is_symlink()
        yield from (_relative(file, workdir) for file in (below if is_folder else [path]))


def _is_one_of(file: Path, others: Sequence[Path]) -> bool:
    return any(other.exists() and file.exists() and file.samefile(other) for other in others)


def _not_ignored(folder: Path) -> Iterator[str]:
    listed = _listed_by_git(folder)
    if not listed:  # also if git ignores the folder
        yield from _walked(folder)
        return
    for path in listed:
        full_path = folder / path
        if full_path.is_dir() and not full_path.is_symlink():  # a nested repository
            yield from (f"{path.rstrip('/')}/{below}" for below in _not_ignored(full_path))
        else:
            yield path


def _listed_by_git(folder: Path) -> list[str] | None:
    """Return the files that git lists, or None if the folder is in no repository."""
    try:
        done = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except FileNotFoundError:
        return None
    if done.returncode == 0:
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    message = done.stderr.decode(errors="replace").strip()
    if "not a git repository" in message:
        return None
    raise SnapshotError(f"{folder}: git cannot list its files: {message}")


def _walked(root: Path) -> Iterator[str]:
    """Yield what git would list if the folder were a repository, except Python's own files.

    Raises OSError.
    """
    ignore_files = [IgnoreFiles(root, GITIGNORE), IgnoreFiles(root, LAUNCHERIGNORE)]

    def kept(path: str) -> bool:
        return not any(files.ignore(path) for files in ignore_files)

    def fail(error: OSError) -> None:
        raise error

    for path, folders, names in os.walk(root, onerror=fail):
        parent = Path(path)
        links = [name for name in folders if (parent / name).is_symlink()]
        inner = [name for name in folders if name not in (".git", "__pycache__", *links)]
        inner = [name for name in inner if kept(f"{_relative(parent / name, root)}/")]
        repositories = [name for name in inner if (parent / name / ".git").exists()]
        folders[:] = [
            name for name in inner if name not in repositories and not (parent / name / "pyvenv.cfg").exists()
        ]
        for name in repositories:
            repository_path = _relative(parent / name, root)
            yield from (f"{repository_path}/{below}" for below in _not_ignored(parent / name))
        yield from filter(kept, (_relative(parent / name, root) for name in [*names, *links]))


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root))
