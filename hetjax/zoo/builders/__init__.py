"""Data sets that hetjax prepares itself, from their original files and without TensorFlow.

- `files` finds, downloads and checks the original files.
- `digits`, `cifar10` and `mnist` read them into `(image, label)` records, with NumPy alone.
- `prepared` writes these records as a TFDS array_record data set; it alone imports TFDS.
- `wikitext2`, `glue` and `m4_weekly` make arrays of theirs when they are opened.
"""
