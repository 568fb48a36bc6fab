"""`python -m tests.render.update_goldens`: writes tests/golden/ anew. Read the diff before you commit it."""

from __future__ import annotations

import shutil

from tests.render.examples import GOLDEN, clusters, rendered


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in clusters():
        for path, file in rendered(name).items():
            target = GOLDEN / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.text, encoding="utf-8")
    print(f"wrote {sum(1 for path in GOLDEN.rglob('*') if path.is_file())} files to {GOLDEN}")


if __name__ == "__main__":
    main()
