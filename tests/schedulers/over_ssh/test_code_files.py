"""Which files are the job's code: as git has it, with git and without, and nothing that looks secret."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.schedulers.over_ssh.code_files import SnapshotError, code_files
from launcher.schedulers.over_ssh.secret_names import looks_secret

TREE = (
    "a.py",
    "b.bin",
    "sub/a.py",
    "sub/b.bin",
    "sub/deep/a.py",
    "sub/deep/b.bin",
    "data/x",
    "data/sub/y",
    "# z",
)
LINES = st.sampled_from(
    [
        *("*.bin", "!b.bin", "sub/", "!sub/", "sub", "/a.py", "a.py", "!a.py", "deep", "sub/deep/", "y"),
        *("data/*", "!data/sub", "!data/sub/", "/sub/*", "!/sub/deep", "data/**", "*", "!*.py", "!*/", "**"),
        *("", "x ", "# comment", r"\# z", "?.py", "[ab].bin", "sub/**/a.py", "**/deep/*.py", "a.py\r"),
        *("sub/**", "!sub/**", "!data/**"),
    ]
)
IGNORE = st.dictionaries(st.sampled_from(["", "sub/", "sub/deep/", "data/"]), st.lists(LINES, max_size=5))


def _write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def _git(folder: Path, *arguments: str) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


@pytest.mark.slow
@settings(max_examples=150)
@given(IGNORE)
def test_without_git_the_same_files_are_code_as_with_it(ignore: dict[str, list[str]]) -> None:
    """Nested files, negations, folders, comments, in any order."""
    with tempfile.TemporaryDirectory() as name:
        plain = _write(Path(name) / "plain", *TREE)
        for folder, lines in ignore.items():
            (plain / folder / ".gitignore").write_text("".join(f"{line}\n" for line in lines), newline="")
        known = Path(shutil.copytree(plain, Path(name) / "known"))
        _git(known, "init", "-q")
        assert code_files(plain) == code_files(known)


@pytest.mark.parametrize("name", [".gitignore", ".launcherignore"])
def test_a_pattern_of_what_is_in_an_ignored_folder_does_not_send_the_folder(
    tmp_path: Path, name: str
) -> None:
    """As for git, `!data/**` takes nothing back of a folder that is ignored itself."""
    (_write(tmp_path, "a.py", "data/x", "data/sub/y") / name).write_text("data/\n!data/**\n")
    assert code_files(tmp_path)[0] == [name, "a.py"]


@pytest.mark.slow
@settings(max_examples=60)
@given(IGNORE)
def test_launcherignore_says_what_gitignore_would(ignore: dict[str, list[str]]) -> None:
    """With git and without, also of what git tracks."""
    with tempfile.TemporaryDirectory() as name:
        plain, own = _write(Path(name) / "plain", *TREE), _write(Path(name) / "own", *TREE)
        for folder, lines in ignore.items():
            text = "".join(f"{line}\n" for line in lines)
            (plain / folder / ".gitignore").write_text(text, newline="")
            (own / folder / ".launcherignore").write_text(text, newline="")
        tracked = Path(shutil.copytree(own, Path(name) / "tracked"))
        _git(tracked, "init", "-q")
        _git(tracked, "add", "--all")
        expected = [path for path in code_files(plain)[0] if not path.endswith("ignore")]
        for folder in (own, tracked):
            assert [path for path in code_files(folder)[0] if not path.endswith("ignore")] == expected


@settings(max_examples=60)
@given(IGNORE)
def test_ignore_files_above_the_working_directory_count_up_to_the_projects_root(
    ignore: dict[str, list[str]],
) -> None:
    """As git reads `.gitignore` there, so is `.launcherignore` read, and both without git."""
    with tempfile.TemporaryDirectory() as name:
        plain, own = _write(Path(name) / "plain", *TREE), _write(Path(name) / "own", *TREE)
        for folder, lines in ignore.items():
            text = "".join(f"{line}\n" for line in lines)
            (plain / folder / ".gitignore").write_text(text, newline="")
            (own / folder / ".launcherignore").write_text(text, newline="")
        known = Path(shutil.copytree(plain, Path(name) / "known"))
        _git(known, "init", "-q")
        for folder in (plain, own):
            (folder / "pyproject.toml").touch()
        (Path(name) / ".gitignore").write_text("*")
        expected = [path for path in code_files(known / "sub")[0] if not path.endswith("ignore")]
        for folder in (plain, own):
            found = [path for path in code_files(folder / "sub")[0] if not path.endswith("ignore")]
            assert found == expected


def test_a_launcherignore_of_the_repository_counts_in_a_folder_of_it(tmp_path: Path) -> None:
    work = _write(tmp_path / "w", "job/a.py", "job/data/big", "job/out/b", "other.py") / "job"
    _git(tmp_path, "init", "-q", "w")
    (tmp_path / "w" / ".launcherignore").write_text("data/\n/job/out\n")
    assert code_files(work)[0] == ["a.py"]
    (tmp_path / "link").symlink_to(work)
    assert code_files(tmp_path / "link")[0] == ["a.py"]
    (tmp_path / "w" / ".launcherignore").write_text("data/\n/job\n")
    assert code_files(work)[0] == ["a.py", "data/big", "out/b"]


SECRET = (
    *(".env", ".env.local", "sub/.env.production", "prod.env", ".envrc", ".env.sh", ".aws/credentials"),
    *(
        ".aws/config",
        "home/.ssh/config",
        ".ssh/known",
        "id_rsa",
        "sub/id_ed25519",
        "id_ecdsa_sk",
        "server.pem",
    ),
    *(".bash_history", ".python_history", ".databrickscfg", "kubeconfig", ".Renviron", "gcp-key.json"),
    "passwords.txt",
    *("TLS.KEY", ".netrc", ".git-credentials", ".pypirc", ".npmrc", "credentials.json", "kaggle.json"),
    *("gcp/service-account-1.json", "client_secret_7.json", "secrets.yaml", "secrets.toml", ".kube/config"),
    *(".docker/config.json", "cert.p12", "android.jks", "terraform.tfstate", "prod.tfvars", "hf_token"),
    *(
        "token.txt",
        ".hf_token",
        "api_key.txt",
        "api-key",
        "rclone.conf",
        ".pgpass",
        ".streamlit/secrets.toml",
    ),
)
HARMLESS = (
    *("secrets.py", "token.py", "credentials.py", ".env.example", "prod.env.sample", "id_rsa.pub", "env.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "environment.yml", "keys.txt"),
    *("secrets/loader.py", "docs/secrets.md", "monkey.txt", "config.json", "environment", "token_ids.bin"),
)


@pytest.mark.parametrize("git", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
def test_what_looks_secret_is_left_out_and_named(tmp_path: Path, git: bool, tracked: bool) -> None:
    work = _write(tmp_path / "w", *SECRET, *HARMLESS)
    if git:
        _git(tmp_path, "init", "-q", "w")
    if git and tracked:
        _git(work, "add", "--all", "--force")
    files, left_out = code_files(work)
    assert left_out == sorted(SECRET)
    assert files == sorted(HARMLESS)


def test_certificates_and_public_keys_are_no_secrets(tmp_path: Path) -> None:
    certificate = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"
    (tmp_path / "ca.pem").write_text(certificate)
    (tmp_path / "both.pem").write_text(f"{certificate}-----BEGIN RSA PRIVATE KEY-----\nMII\n")
    (tmp_path / "linked.pem").symlink_to("ca.pem")
    assert not looks_secret(tmp_path, "ca.pem")
    assert looks_secret(tmp_path, "both.pem") and looks_secret(tmp_path, "linked.pem")


@pytest.mark.parametrize("git", [False, True])
def test_what_the_job_names_is_sent_whatever_ignores_it(tmp_path: Path, git: bool) -> None:
    work = _write(tmp_path / "w", "a.py", ".env", "certs/a.pem", "certs/sub/b.pem", "key.pem", "made/big.bin")
    (work / ".gitignore").write_text("made/\n.env\n")
    (work / ".launcherignore").write_text("certs/\n")
    if git:
        _git(tmp_path, "init", "-q", "w")
    files, left_out = code_files(work, send=[".env", "certs/*.pem", "made"])
    assert left_out == ["key.pem"]
    assert files == [".env", ".gitignore", ".launcherignore", "a.py", "certs/a.pem", "made/big.bin"]
    with pytest.raises(SnapshotError, match=r"send: there is no \*\.crt"):
        code_files(work, send=["*.crt"])


def test_a_file_with_a_secret_of_the_job_is_left_out_under_any_name(tmp_path: Path) -> None:
    work = _write(tmp_path / "w", "a.py", "innocent.txt", "elsewhere.txt")
    (work / "hard link.txt").hardlink_to(work / "innocent.txt")
    assert code_files(work, secret=[work / "innocent.txt", tmp_path / "none"]) == (
        ["a.py", "elsewhere.txt"],
        ["hard link.txt", "innocent.txt"],
    )


def test_a_repository_in_a_folder_without_git_is_listed_by_git(tmp_path: Path) -> None:
    work = _write(tmp_path / "w", "a.py", "lib/b.py", "lib/c.bin", "lib/.env")
    _git(tmp_path, "init", "-q", "w/lib")
    (work / "lib/.git/info/exclude").write_text("*.bin\n")
    assert code_files(work) == (["a.py", "lib/b.py"], ["lib/.env"])


def test_a_line_that_is_no_pattern_is_named(tmp_path: Path) -> None:
    work = _write(tmp_path / "w", "a.py")
    (work / ".launcherignore").write_text("*.bin\n!\n")
    with pytest.raises(SnapshotError, match=r"\.launcherignore:2: '!' is not a pattern"):
        code_files(work)


def test_the_repository_of_a_hook_is_not_that_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git sets these variables for hooks and for `git rebase --exec`."""
    work, other = _write(tmp_path / "w", "a.py", "b.bin"), _write(tmp_path / "other", "z.py")
    (work / ".gitignore").write_text("*.bin\n")
    for folder in (work, other):
        _git(folder, "init", "-q")
        _git(folder, "add", ".")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert code_files(work) == ([".gitignore", "a.py"], [])
