"""Find out which GPU a site means by the type in its GRES: `a100`, `nvidia_h100_80gb_hbm3`, `rtxa6000`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.planning.hardware import CARDS, Card


def likely_cards(gres_type: str, features: Iterable[str] = ()) -> list[Card]:
    """All GPUs that the type may mean, smallest memory first.

    Empty if the name is unknown or names a MIG slice. With AutoDetect=nvml the type is the device name in
    lower case; otherwise it is whatever the administrator chose.
    """
    if not gres_type or re.search(r"\d+g\.\d+gb", gres_type):
        return []
    device = gres_type.replace("_", " ")
    for name in (device, f"nvidia {device}"):
        exact = [card for card in CARDS if re.fullmatch(card.names, name, re.IGNORECASE)]
        if exact and exact[0].names.count(".*") == 0:
            return exact[:1]
    plain = _plain(gres_type)
    tokens = {card.label: _token(card) for card in CARDS}
    named = {token for token in tokens.values() if re.search(rf"{token}(?![0-9])", plain)}
    if not named:
        return []
    longest = max(named, key=len)
    cards = [card for card in CARDS if tokens[card.label] == longest]
    hints = " ".join(
        (gres_type, *(feature for feature in features if longest in _plain(feature) or "mem" in feature))
    )
    for narrower in (
        [card for card in cards if (size := re.search(r"(\d+)GB", card.label)) and _sized(size[1], hints)],
        [card for card in cards if "PCIe" in card.label and "pci" in hints.lower()],
        [card for card in cards if "PCIe" not in card.label and "sxm" in hints.lower()],
    ):
        both = [card for card in cards if card in narrower]
        cards = both or cards
    return sorted(cards, key=lambda card: card.memory)


def _sized(size: str, hints: str) -> bool:
    return re.search(rf"(?<!\d){size}(?!\d)", hints) is not None


def _token(card: Card) -> str:
    """`A100 80GB PCIe` -> `a100`, `RTX A6000` -> `a6000`, `RTX 6000 Ada` -> `6000ada`."""
    words = [
        word
        for word in card.label.split()
        if word not in ("RTX", "PCIe", "NVL", "80GB", "40GB", "32GB", "16GB")
    ]
    return _plain("".join(words))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
