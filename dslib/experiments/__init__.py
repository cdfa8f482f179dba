"""What the notebooks run: arms, sizes, searches and tables, a file a notebook. No method knows of it."""
