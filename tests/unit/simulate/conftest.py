from tests.unit.simulate.deployments import checkpoint

__all__ = ["checkpoint"]
