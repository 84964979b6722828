"""Write the crane's meshes and its texture into assets/: python make_meshes.py. Metres; z is up, as in MuJoCo."""

import struct
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parent / "assets"
Faces = list[np.ndarray]  # Polygons [V, 3], corners counterclockwise from outside


def main(folder: Path = ASSETS) -> None:
    """Write all files, with the same bytes each time."""
    folder.mkdir(exist_ok=True)
    write_obj(folder / "pedestal.obj", tube([(0.14, 0.0), (0.14, 0.03), (0.05, 0.06), (0.045, 0.5)], 12))
    write_stl(folder / "pedestal_collision.stl", tube([(0.14, 0.0), (0.14, 0.03), (0.05, 0.06)], 8))
    write_obj(folder / "jib.obj", beam(-0.2, 0.62, 0.03) + moved(box(0.04, 0.04, 0.03), (-0.16, 0.0, -0.03)))
    write_stl(folder / "jib_collision.stl", box(0.41, 0.025, 0.025, centre=(0.21, 0.0, 0.0)))
    write_obj(folder / "trolley.obj", box(0.035, 0.045, 0.012))
    write_stl(folder / "grab.stl", hook())
    write_stl(folder / "jaw.stl", box(0.006, 0.015, 0.03, centre=(0.0, 0.0, -0.03)))
    write_obj(folder / "crate.obj", box(0.05, 0.05, 0.04))
    (folder / "stripes.png").write_bytes(stripes())


def box(x: float, y: float, z: float, centre: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Faces:
    """Make a box of these half sizes."""
    corner = np.array([[a, b, c] for c in (-z, z) for a, b in ((-x, -y), (x, -y), (x, y), (-x, y))]) + centre
    sides = ((3, 2, 1, 0), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7))
    return [corner[list(side)] for side in sides]


def tube(profile: list[tuple[float, float]], num_sides: int) -> Faces:
    """Turn (radius, height) pairs, upwards, about z; closed at both ends."""
    angle = np.arange(num_sides) * 2.0 * np.pi / num_sides
    round_ = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    rings = [np.column_stack([radius * round_, np.full(num_sides, height)]) for radius, height in profile]
    sides = [
        np.stack([low[i], low[(i + 1) % num_sides], high[(i + 1) % num_sides], high[i]])
        for low, high in pairwise(rings)
        for i in range(num_sides)
    ]
    return [rings[0][::-1], *sides, rings[-1]]


def beam(start: float, end: float, size: float, num_bays: int = 6) -> Faces:
    """Make a lattice along x: two chords below, one above, and struts between them."""

    def at(x: float, corner: tuple[float, float]) -> np.ndarray:
        return np.array([x, *corner])

    corners = ((-size, -size), (size, -size), (0.0, size))
    faces = [face for corner in corners for face in bar(at(start, corner), at(end, corner), 0.004)]
    for here, there in pairwise(np.linspace(start, end, num_bays + 1)):
        for one, other in pairwise((*corners, corners[0])):
            faces += bar(at(here, one), at(there, other), 0.0025)
    return faces


def bar(start: np.ndarray, end: np.ndarray, half: float) -> Faces:
    """Make a square bar from one point to another."""
    length = np.linalg.norm(end - start)
    along = (end - start) / length
    side = np.cross(along, [0.0, 1.0, 0.3])
    side /= np.linalg.norm(side)
    frame = np.column_stack([side, np.cross(along, side), along])
    return [face @ frame.T + (start + end) / 2.0 for face in box(half, half, length / 2.0)]


def hook() -> Faces:
    """Make a C of boxes, open to one side: its convex hull is another shape."""
    parts = [((0.03, 0.01, 0.008), 0.0, 0.0), ((0.008, 0.01, 0.03), -0.022, -0.03), ((0.02, 0.01, 0.008), -0.01, -0.06)]
    return [face for size, x, z in parts for face in box(*size, centre=(x, 0.0, z))]


def moved(faces: Faces, by: tuple[float, float, float]) -> Faces:
    return [face + np.array(by) for face in faces]


def write_obj(path: Path, faces: Faces) -> None:
    """Write polygons with texture coordinates: each face shows the whole picture."""
    lines, count = ["# made by make_meshes.py"], 0
    for face in faces:
        lines += [f"v {x:.5g} {y:.5g} {z:.5g}" for x, y, z in face]
        turn = np.arange(len(face)) * 2.0 * np.pi / len(face) + np.pi / 4.0
        lines += [f"vt {0.5 + 0.7 * np.cos(a):.4g} {0.5 + 0.7 * np.sin(a):.4g}" for a in turn]
        lines.append("f " + " ".join(f"{count + i}/{count + i}" for i in range(1, len(face) + 1)))
        count += len(face)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_stl(path: Path, faces: Faces) -> None:
    """Write triangles in the binary form."""
    triangles = [(face[0], face[i], face[i + 1]) for face in faces for i in range(1, len(face) - 1)]
    data = b"made by make_meshes.py".ljust(80) + struct.pack("<I", len(triangles))
    for one, two, three in triangles:
        normal = np.cross(two - one, three - one)
        normal = normal / np.linalg.norm(normal)
        data += struct.pack("<12fH", *normal, *one, *two, *three, 0)
    path.write_bytes(data)


def stripes(size: int = 64) -> bytes:
    """Make a PNG of yellow and black stripes."""
    row, column = np.indices((size, size))
    yellow, black = np.array([240, 190, 20], np.uint8), np.array([30, 30, 30], np.uint8)
    pixel = np.where(((row + column) // 8 % 2 == 0)[..., None], yellow, black)
    lines = b"".join(b"\0" + line.tobytes() for line in pixel)
    parts = (
        (b"IHDR", struct.pack(">2I5B", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


if __name__ == "__main__":
    main()
