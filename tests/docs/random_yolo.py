"""Write best.pt, a YOLO with random weights that finds a bus in each large cell. ultralytics' Python runs this file."""

import torch
from ultralytics import YOLO

torch.manual_seed(0)
yolo = YOLO("yolo11n.yaml")
yolo.model.names = {**yolo.model.names, 0: "person", 5: "bus"}
yolo.model.model[-1].cv3[2][-1].bias.data[5] = 1.0
yolo.save("best.pt")
