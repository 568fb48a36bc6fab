"""Recognise files that look like secrets by their names. They are not sent with the job's code."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

FOLDERS = {".aws", ".azure", ".gcloud", ".gnupg", ".kube", ".oci", ".password-store", ".ssh"}
"Everything in these folders is secret."

NAMES = (
    # Environment variables; see also `looks_secret`.
    "*.env",
    # Credentials that tools store.
    *(".netrc", "_netrc", ".git-credentials", ".pgpass", ".my.cnf", ".pypirc", ".npmrc", ".yarnrc.yml"),
    *(".dockercfg", ".dockerconfigjson", ".htpasswd", ".s3cfg", ".boto", "rclone.conf", ".vault-token"),
    *("kaggle.json", "credentials", "credentials.json", "credentials.y*ml", "credentials.csv"),
    *("credentials.ini", "credentials.toml", "credentials.db", "*.credentials", "*-credentials.json"),
    *("client_secret*.json", "service[-_]account*.json", "application_default_credentials.json"),
    *("secret.*", "secrets.*", ".secret", ".secrets", "*.secret", "*.secrets", "secret", "secrets"),
    *("token", ".token", "*.token", "*_token", "*-token", "token.txt", "*_token.txt", "token.json"),
    *("api[-_]key*", "*.apikey", ".hf_token", "runpod-key", "runpod-s3-key", "accesskeys.csv"),
    *(".databrickscfg", "kubeconfig*", ".renviron", "*[-_]key.json", "password*.txt", "passwd*.txt"),
    # Shell histories, which may contain tokens.
    *(".*_history", ".*-history"),
    *("*.tfstate", "*.tfstate.backup", "*.tfvars", "*.tfvars.json", ".pip.conf", "wandb-key*"),
    # Private keys and key stores.
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "ssh_host_*_key"),
    *("*.pem", "*.key", "*.ppk", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.kdb"),
    *("*.ovpn", "*.asc", "keytab", "*.keytab"),
)
"Patterns for `fnmatch`, in lower case."

EXAMPLES = (".example", ".sample", ".template", ".tmpl", ".dist", ".defaults")
"Suffixes of example files, which only show the form of a secret one."

CODE = (
    *(".py", ".pyi", ".pyx", ".so", ".c", ".cc", ".cpp", ".cu", ".h", ".hpp", ".cuh", ".rs", ".go", ".js"),
    *(".ts", ".java", ".jl", ".sh", ".md", ".rst", ".html", ".j2", ".ipynb"),
)
"Suffixes of programs and documents, whose names may mention secrets."

_PUBLIC = (b"BEGIN CERTIFICATE", b"BEGIN PUBLIC KEY", b"BEGIN PGP PUBLIC KEY", b"BEGIN PGP SIGNATURE")
_MAX_READ = 2**20  # bytes; a bundle of all certificate authorities is a quarter of that


def looks_secret(root: Path, path: str) -> bool:
    """Return whether the file `path`, relative to `root`, looks like a secret. Raises OSError."""
    lower_path = PurePosixPath(path.lower())
    if FOLDERS & set(lower_path.parts[:-1]):
        return lower_path.suffix != ".pub"
    if lower_path.parts[-2:] in ((".docker", "config.json"), (".streamlit", "secrets.toml")):
        return True
    if lower_path.suffix in (*EXAMPLES, ".pub"):
        return False
    if re.match(r"\.env([^a-z]|rc|$)", lower_path.name):
        return True
    if lower_path.suffix in CODE:
        return False
    return any(fnmatchcase(lower_path.name, name) for name in NAMES) and not _public(root / path)


def _public(file: Path) -> bool:
    """Return whether the file holds certificates or public keys, and no private key."""
    if file.is_symlink() or not file.is_file():
        return False
    with open(file, "rb") as opened:
        text = opened.read(_MAX_READ)
    return any(mark in text for mark in _PUBLIC) and b"PRIVATE KEY" not in text and len(text) < _MAX_READ
