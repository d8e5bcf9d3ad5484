"""Data sets that hetjax prepares itself, from their original files and without TensorFlow.

`files` finds, downloads and checks the original files; `digits`, `cifar10` and `mnist` read
them into `(image, label)` records and are plain NumPy; `prepared` writes the records as a TFDS
array_record data set, and is the only one that imports TFDS.
"""
