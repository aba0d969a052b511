"""Make the backgrounds of composed scenes from the photographs that scikit-image carries.

    python timm_locat/data/embedded/photographs/make_photographs.py --source .../site-packages/skimage/data

They are shrunk to at most 512 pixels a side and saved as JPEG; see README.md beside this file.
"""

import argparse
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
FILES = (
    *("brick.png", "clock_motion.png", "coffee.png", "gravel.png", "hubble_deep_field.jpg", "rocket.jpg"),
    *("camera.png", "chelsea.png", "grass.png"),
)
SIDE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder skimage/data of scikit-image 0.26.0")
    source = parser.parse_args().source
    for file in FILES:
        image = Image.open(source / file)
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        image.save(HERE / f"{file.partition('.')[0]}.jpg", quality=88, optimize=True)


if __name__ == "__main__":
    main()
