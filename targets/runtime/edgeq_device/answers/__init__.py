"""Turn a model's outputs into answers: boxes, masks, keypoints, text, classes, maps.

A `Head` (head.py) says how, as data that a bundle stores. A `Family` (family.py) is the code for one kind of head.
"""
