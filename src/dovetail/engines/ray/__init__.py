"""Engine on a Ray cluster: one agent per node hosts a local engine. The only package that imports Ray, and only when
it is used."""
