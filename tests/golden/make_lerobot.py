"""Write lerobot_v3/: a dataset made by LeRobot itself, which tests/data/test_lerobot.py reads.

Usage: python make_lerobot.py
    In an environment with lerobot 0.4.4, numpy < 2.3 and PyAV; torchvision is imported only.

Three episodes of 6, 7 and 8 frames at 10 Hz. Frame t of episode e: state (e, t, e·t), action (e, -t), reward t; two
cameras, one a video, one PNGs with channels first in info.json, both 60·e + 20 on the left and 20·t + 20 on the right.
"""

import shutil
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FOLDER = Path(__file__).with_name("lerobot_v3")
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "observation.images.front": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "image", "shape": (3, 32, 48), "names": ["channels", "height", "width"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "remark": {"dtype": "string", "shape": (1,), "names": None},
}


def picture(height: int, width: int, left: int, right: int) -> np.ndarray:
    made = np.full((height, width, 3), left, np.uint8)
    made[:, width // 2 :] = right
    return made


shutil.rmtree(FOLDER, ignore_errors=True)
dataset = LeRobotDataset.create(
    "ejax/golden", fps=10, features=FEATURES, root=FOLDER, robot_type="toy", use_videos=True
)
for e in range(3):
    for t in range(6 + e):
        dataset.add_frame(
            {
                "observation.state": np.array([e, t, e * t], np.float32),
                "observation.images.front": picture(64, 96, 60 * e + 20, 20 * t + 20),
                "observation.images.wrist": picture(32, 48, 60 * e + 20, 20 * t + 20),
                "action": np.array([e, -t], np.float32),
                "next.reward": np.array([t], np.float32),
                "remark": f"r{t}",
                "task": ("push the cube", "lift the ball")[e % 2],
            }
        )
    dataset.save_episode()
dataset.finalize()
