"""Calls of Python from CPU programs that JAX's compilation cache can keep.

``jax.pure_callback`` writes an address of this process into the program. Here it names a handler of XLA's foreign
function interface and a number, by which that finds the function: both are the same in the next process.
Source: xla/ffi/api/c_api.h, version 0.3, whose structures these are.
"""

import ctypes
import functools
import math
import traceback
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.types import Array, PyTree

FOR_ABSENT_DEVICES = ContextVar("FOR_ABSENT_DEVICES", default=False)
"""True: programs are compiled, and never run."""
_TARGET = "ejax_host_call"
_EXECUTE, _METADATA, _INTERNAL = 3, 1, 13
_DTYPES: dict[int, Any] = {1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16}
_DTYPES |= {8: np.uint32, 9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64, 16: jnp.bfloat16}
"""``XLA_FFI_DataType`` -> what JAX makes of it."""
_functions: dict[int, Callable[..., tuple[NDArray[Any], ...]]] = {}


def host_call(
    function: Callable[..., tuple[NDArray[Any], ...]], shapes: tuple[jax.ShapeDtypeStruct, ...], *args: Array, name: str
) -> tuple[Array, ...]:
    """Do ``jax.pure_callback(function, shapes, *args, vmap_method="broadcast_all")``, for programs that are cached.

    Args:
        function: gets NumPy views that it must neither change nor keep, and returns as many arrays as ``shapes``.
        name: of the function: the same in each process, and of no other function.
    """

    def cached(*args: Array) -> PyTree:
        return jax.ffi.ffi_call(_TARGET, shapes, vmap_method="broadcast_all")(*args, function=np.int64(number))

    def uncached(*args: Array) -> PyTree:
        if FOR_ABSENT_DEVICES.get():  # JAX asks those for the call; on a GPU it makes this one
            call = jax.ffi.ffi_call("xla_ffi_python_gpu_callback", shapes, vmap_method="broadcast_all")
            return call(*args, index=np.uint64(0))
        return jax.pure_callback(function, shapes, *args, vmap_method="broadcast_all")

    number = zlib.crc32(name.encode())
    if _functions.setdefault(number, function) is not function or not _registered():
        return tuple(uncached(*args))
    return tuple(jax.lax.platform_dependent(*args, cpu=cached, default=uncached))


def _struct(**fields: Any) -> Any:
    return type("_Struct", (ctypes.Structure,), {"_fields_": tuple(fields.items())})


_HEAD = {"size": ctypes.c_size_t, "extension": ctypes.c_void_p}  # two fields that most structures begin with
_Version = _struct(**_HEAD, major=ctypes.c_int, minor=ctypes.c_int)
_Error = _struct(**_HEAD, message=ctypes.c_char_p, code=ctypes.c_int)
_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Error))
_Api = _struct(**_HEAD, version=_Version, internal=ctypes.c_void_p, create_error=_CreateError)
_Metadata = _struct(size=ctypes.c_size_t, version=_Version, traits=ctypes.c_uint32)
_Extension = _struct(size=ctypes.c_size_t, type=ctypes.c_int, next=ctypes.c_void_p, metadata=ctypes.POINTER(_Metadata))
_Dims = ctypes.POINTER(ctypes.c_int64)
_Buffer = _struct(**_HEAD, dtype=ctypes.c_int, data=ctypes.c_void_p, rank=ctypes.c_int64, dims=_Dims)
_Scalar = _struct(dtype=ctypes.c_int, value=ctypes.POINTER(ctypes.c_int64))
_BufferList = ctypes.POINTER(ctypes.POINTER(_Buffer))
_Buffers = _struct(**_HEAD, count=ctypes.c_int64, types=ctypes.c_void_p, buffers=_BufferList)
_ScalarList = ctypes.POINTER(ctypes.POINTER(_Scalar))
_Attributes = _struct(**_HEAD, count=ctypes.c_int64, types=ctypes.c_void_p, names=ctypes.c_void_p, scalars=_ScalarList)
_CallFrame = _struct(
    size=ctypes.c_size_t,
    extension=ctypes.POINTER(_Extension),
    api=ctypes.POINTER(_Api),
    context=ctypes.c_void_p,
    stage=ctypes.c_int,
    args=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)


@functools.cache
def _registered() -> bool:
    """Register the handler. False: XLA speaks another version, which these structures may not fit."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    address = ctypes.cast(_handle, ctypes.c_void_p)
    try:
        jax.ffi.register_ffi_target(_TARGET, capsule(address, b"xla._CUSTOM_CALL_TARGET", None), platform="cpu")
    except Exception:  # jaxlib's own, without a common class
        return False
    return True


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handle(pointer: Any) -> int | None:
    """``XLA_FFI_Handler``: None for success, or the address of an error."""
    frame = pointer.contents
    api = frame.api.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        version = frame.extension.contents.metadata.contents.version
        if api.version.major == 0:  # else the zeros that are there already: refused at registration
            version.major, version.minor = api.version.major, api.version.minor
        return None
    if frame.stage != _EXECUTE:
        return None
    try:
        args = [_view(frame.args.buffers[i].contents) for i in range(frame.args.count)]
        results = _functions[frame.attributes.scalars[0].contents.value[0]](*args)
        for i in range(frame.results.count):
            _view(frame.results.buffers[i].contents)[...] = results[i]
    except BaseException:  # no exception may pass through C; JAX raises it in the caller
        error = _Error(ctypes.sizeof(_Error), None, traceback.format_exc().encode(), _INTERNAL)
        return api.create_error(error)
    return None


def _view(buffer: Any) -> NDArray[Any]:
    shape, dtype = buffer.dims[: buffer.rank], np.dtype(_DTYPES[buffer.dtype])
    if not (size := math.prod(shape) * dtype.itemsize):
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.frombuffer(memory, dtype).reshape(shape)
