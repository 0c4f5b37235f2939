"""Decode one family of heads in each module. A module has its `Family` under the name FAMILY, and is found by its file
name: the family "yolo-seg" is yolo_seg.py.
"""
