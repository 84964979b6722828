"""The keys of a gym config that EmbodiChain reads and that change nothing in ejax, with the reason."""

_PHYSX = "no effect: an option of PhysX"
_ONE_RENDERER = "no effect: there is one renderer"
_DATASET = "no effect: training records no dataset"
_TRAJECTORIES = "no effect: training records no trajectories"
_LINKS = "no effect: links have the masses and frictions of ejax's model"
_FIXED_BASE = "no effect: the base is fixed"
_NO_ASSET = "no effect: there is no asset file"
_OWN_KINEMATICS = "no effect: ejax solves inverse kinematics in its own way"
_NO_SHELL = "no effect: MuJoCo has no contact shell"
_NO_LIMIT = "no effect: MuJoCo limits no velocity"
_EVERYTHING = "no effect: pictures show everything, however near or far"
_OF_INTRINSICS = "no effect: EmbodiChain reads intrinsics"

IGNORED: dict[str, dict[str, str]] = {
    "": {
        "max_episodes": "no effect: training counts env steps",
        "headless": "no effect: ejax opens no window",
        "device": "no effect: trainer.device decides",
        "gpu_id": "no effect: trainer.device names the GPU",
        "arena_space": "no effect: environments share no space",
        "renderer": _ONE_RENDERER,
        "render_cfg": _ONE_RENDERER,
        "enable_rt": "no effect: ejax renders without ray tracing",
        "visualization": "no effect: ejax opens no window",
        "physics": "no effect: env.cfg.physics chooses the engine",
        "scene_node_capacity": "no effect: scenes are as large as they need be",
        "light": "no effect: the picture has lights of its own",
    },
    "physics_config": dict.fromkeys(
        ("bounce_threshold", "cache_material", "enable_ccd", "length_tolerance", "speed_tolerance"), _PHYSX
    ),
    "physics_config of Newton": {
        "solver_cfg": "no effect: an option of Newton; env.cfg.physics chooses the engine",
        "sync_to_renderer": "no effect: pictures are of the state that they are observed with",
    },
    "robot": {
        "attrs": _LINKS,
        "link_attrs": _LINKS,
        "root_props": _FIXED_BASE,
        "fix_base": _FIXED_BASE,
        "build_pk_chain": "no effect: kinematics come with the model",
        "asset_physics_mode": _NO_ASSET,
        "disable_self_collision": "no effect: the robot does not collide with itself",
        "min_position_iters": _PHYSX,
        "min_velocity_iters": _PHYSX,
        "enable_sensor": "no effect: enable_sensor at the top level decides",
        "sleep_threshold": "no effect: nothing sleeps",
        "compute_uv": _NO_ASSET,
        "use_usd_properties": _NO_ASSET,
        "workspace_cfg": "no effect: ejax samples no workspaces",
    },
    "robot.urdf_cfg": dict.fromkeys(
        ("name_prefix", "name_case", "component_prefix", "base_link_name", "use_signature_check"),
        "no effect: joints have EmbodiChain's names",
    ),
    "robot.solver_cfg.<part>": {
        **dict.fromkeys(("class_type", "ur_type", "urdf_path", "end_link_name", "root_link_name"), _OWN_KINEMATICS),
        **dict.fromkeys(("joint_names", "num_samples", "ik_nearest_weight", "user_qpos_limits"), _OWN_KINEMATICS),
    },
    "robot.drive_pros": {
        "friction": "no effect: ejax's joints have no dry friction",
        "armature": "no effect: ejax's robots have their own",
    },
    "sensor": {
        "near": _EVERYTHING,
        "far": _EVERYTHING,
        **dict.fromkeys(("fx", "fy", "cx", "cy", "fx_r", "fy_r", "cx_r", "cy_r"), _OF_INTRINSICS),
        **dict.fromkeys(("init_pos", "init_rot", "init_local_pose"), "no effect: extrinsics place a camera"),
        "fps": "no effect: a picture is taken at every control step, as in EmbodiChain, which reads no such key",
        "visualization_role": "no effect: ejax opens no window",
        "fpath": _NO_ASSET,
    },
    "sensor.stereo": {"left_to_right_rot": "no effect, as in EmbodiChain: both lenses look the same way"},
    "rigid_object": dict.fromkeys(
        ("max_convex_hull_num", "acd_method", "sdf_resolution", "use_usd_properties"),
        "no effect: shapes are primitives",
    ),
    "rigid_object.shape": {
        "resolution": "no effect: shapes are exact",
        "visual_material": "no effect: ejax has its own colours",
    },
    "rigid_object.attrs": {
        "static_friction": "no effect: MuJoCo has one coefficient, dynamic_friction gives it",
        "restitution": "no effect: contacts are critically damped",
        "contact_offset": _NO_SHELL,
        "rest_offset": _NO_SHELL,
        "max_depenetration_velocity": "no effect: MuJoCo's contacts are springs",
        "max_linear_velocity": _NO_LIMIT,
        "max_angular_velocity": _NO_LIMIT,
        "density": "no effect: mass gives it",
        "inertia": "no effect: the shape gives it",
        "recompute_inertia": "no effect: the shape gives it",
        "enable_ccd": _PHYSX,
        "min_position_iters": _PHYSX,
        "min_velocity_iters": _PHYSX,
        "sleep_threshold": "no effect: nothing sleeps",
        "retain_acceleration": _PHYSX,
    },
    "env": {"dataset": _DATASET},
    "env.events": {"is_global": "no effect: each environment counts its own steps"},
    "env.observations": {"extra": "no effect: shapes are read off the functor"},
    "env.extensions": {
        "action_type": "no effect beside env.actions, whose func says how an action acts",
        "action_scale": "no effect beside env.actions; give the scale in its params",
        "obs_mode": "no effect: the observation is what env.observations makes of it",
        "seed": "no effect: trainer.seed decides",
        "filter_visual_rand": "no effect: ejax has no visual randomization",
        "filter_dataset_saving": _DATASET,
        "init_rollout_buffer": "no effect: ejax's rollouts are its own",
        "record_trajectory": _TRAJECTORIES,
        "trajectory_uids": _TRAJECTORIES,
        "trajectory_save_dir": _TRAJECTORIES,
        "trajectory_auto_save": _TRAJECTORIES,
    },
}
"""Section -> key -> reason. ``rigid_object`` means ``background`` too. Of a body's attributes, ``static_friction``
counts where there is no dynamic one."""
