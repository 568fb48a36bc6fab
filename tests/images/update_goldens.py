"""`python -m tests.images.update_goldens`: writes the golden files anew. Read the diff first."""

from __future__ import annotations

import shutil

from tests.images.examples import GOLDEN, images, rendered


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for image in images():
        for path, file in rendered(image).items():
            target = GOLDEN / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.text, encoding="utf-8")
    print(f"wrote {sum(1 for path in GOLDEN.rglob('*') if path.is_file())} files to {GOLDEN}")


if __name__ == "__main__":
    main()
