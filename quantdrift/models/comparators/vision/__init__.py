"""The comparators for detected objects and for segmentation masks."""
