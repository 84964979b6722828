"""MuJoCo: both of its engines, drawing, and the kinematics of its models."""
