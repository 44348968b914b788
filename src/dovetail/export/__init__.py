"""Files that deploy the job queue: for Docker Compose, and for Kubernetes with KEDA and KubeRay."""
