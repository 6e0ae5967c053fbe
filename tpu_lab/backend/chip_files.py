"""TPU chips as the files of this machine show them: which there are, how to reach them, who holds them.

Reading only: no TPU is started, nothing is opened. `root` stands for "/", so tests can build a machine in a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

GOOGLE = "0x1ae0"  # PCI vendor and devices: pci-ids.ucw.cz, and jax/_src/hardware_utils.py
PCI_CHIPS = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}


def device_files(root: Path) -> list[Path]:
    """The files through which a process owns a TPU chip: /dev/accel<n> (v2 to v4), /dev/vfio/<n> (newer).

    /dev/accel/accel<n>, one folder down, is the NPU of a laptop.
    """
    return sorted(p for pattern in ("accel[0-9]*", "vfio/[0-9]*") for p in root.glob(f"dev/{pattern}"))


def pci_chips(root: Path) -> list[str]:
    """The TPU generation of each TPU on the PCI bus."""
    found = []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if vendor.read_text().strip() == GOOGLE:
            found.append(PCI_CHIPS.get(vendor.with_name("device").read_text().strip()))
    return [name for name in found if name]


def has_chip(root: Path) -> bool:
    """A TPU on the PCI bus and a file to reach it by; vfio alone may serve any device, /dev/accel<n> is a TPU's own."""
    files = device_files(root)
    return bool(files) and (bool(pci_chips(root)) or any("vfio" not in p.parts for p in files))


def find_holders(root: Path) -> tuple[list[tuple[int, str, str]], int]:
    """((pid, name, device file), ...) and the number of processes whose open files may not be read."""
    wanted = {"/" + str(p.relative_to(root)) for p in device_files(root)}
    owners, hidden = [], 0
    for process in sorted((p for p in root.glob("proc/[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name)):
        try:
            opened = [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # it ended while we looked
            continue
        held = wanted.intersection(opened)
        if held:
            try:
                name = (process / "comm").read_text().strip()
            except OSError:
                name = "?"
            owners.append((int(process.name), name, min(held)))
    return owners, hidden
