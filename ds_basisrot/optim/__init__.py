"""The method: Adam in a basis aligned with the eigenvectors of the curvature. Imports torch only."""
