"""HTML -> PNG in a headless Chromium: `python tests/browser/shoot.py report.html out/` makes light and dark, 1100 and 760 px.

The page's ground and ink are a notebook's (`#ffffff` / `#1c2024`, `#181c1a` / `#dfe5e2`). The network is blocked.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

THEMES = {"light": ("#ffffff", "#1c2024"), "dark": ("#181c1a", "#dfe5e2")}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"


def shoot(
    html: dict[str, str], out: Path, widths=(1100, 760), themes=("light", "dark"), font: str = "", scale: int = 2
) -> list[Path]:
    """Screenshots of name -> root markup; returns the files. font: forced on everything, to see what a wide face clips."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, markup in html.items():
            for width in widths:
                for theme in themes:
                    ground, ink = THEMES[theme]
                    force = (
                        f"<style>.tl *:not(code):not(pre) {{ font-family: '{font}' !important }}</style>"
                        if font
                        else ""
                    )
                    page = browser.new_page(viewport={"width": width, "height": 400}, device_scale_factor=scale)
                    page.route("**/*", lambda route: route.abort())
                    page.set_content(
                        f"<!doctype html><body style='margin:0;padding:24px;background:{ground};color:{ink}'>{markup}{force}"
                    )
                    files.append(out / f"{name}_{theme}_{width}{'_' + font.replace(' ', '') if font else ''}.png")
                    page.screenshot(path=str(files[-1]), full_page=True)
                    page.close()
        browser.close()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", nargs="+", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--font", default="")
    parser.add_argument("--width", type=int, action="append")
    args = parser.parse_args()
    pages = {path.stem: path.read_text(encoding="utf-8") for path in args.html}
    for file in shoot(pages, args.out, tuple(args.width or (1100, 760)), font=args.font):
        print(file)


if __name__ == "__main__":
    main()
