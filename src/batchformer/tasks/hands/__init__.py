"""Hand meshes from pictures: Mesh Graphormer, with or without BatchFormerV2."""
