# distutils: language = c++
"""Whether the memory of an Arrow buffer is nobody's to change, so that records may be sent from it without a copy.

pyarrow's Python interface does not tell. Of every buffer it shows the same class, and

    memory                                    is_mutable  parent
    allocated by Arrow (pa.array, Parquet)    True        None
    py_buffer(numpy array or bytearray)       True        None
    py_buffer(bytes)                          False       None
    py_buffer(read-only view of an array)     False       None
    foreign_buffer(), C data interface, mmap  False       None
    slice of any of these                     False       the other

But behind each there is a C++ object whose class does tell. pyarrow gives it out through a C function that it documents
for extensions (`pyarrow_unwrap_buffer`). The first word of an object with virtual functions stands for its class; it is
compared with that of two samples, so that neither Arrow's headers nor its version matter:

    the class of pa.allocate_buffer()         Arrow allocated the memory itself
    the class of pa.py_buffer(b"...")         memory of a Python object: fine if that is a bytes object

All else, and everything if pyarrow should change in this respect, counts as somebody's to change: it is copied. What
cannot be told is whether somebody writes into memory that Arrow has allocated, through numpy.frombuffer(array.buffers()
[1]) or into a pa.allocate_buffer() that an array was made of. Who does so before the records are acknowledged changes them.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

cdef extern from *:
    """
    #include <memory>

    namespace arrow { class Buffer; }

    typedef std::shared_ptr<arrow::Buffer> (*fp_unwrap_t)(PyObject*);

    /* The C++ object of a pyarrow.Buffer, which keeps it alive. */
    static void** fp_object_of(fp_unwrap_t unwrap, PyObject* buffer) {
        return reinterpret_cast<void**>(unwrap(buffer).get());
    }
    """
    ctypedef void* (*fp_unwrap_t)(object)
    void** fp_object_of(fp_unwrap_t unwrap, object buffer)

# Cython puts a function's signature into its capsule: if that were another, there would be no such capsule.
cdef const char* SIGNATURE = "std::shared_ptr< arrow::Buffer>  (PyObject *)"
# A PyBuffer begins with Arrow's own fields and ends in a Py_buffer of ten words: so many it has in any case.
cdef int WORDS = 16

cdef bint learned = False
cdef fp_unwrap_t unwrap = NULL
cdef void* pool_class = NULL
cdef void* python_class = NULL
cdef int exporter = 0  # which word of a PyBuffer is the Python object


cdef int learn() except -1:
    """Looks at the two samples."""
    global learned, unwrap, pool_class, python_class, exporter
    cdef bytes content = bytes(64)
    cdef void** words
    cdef int i
    import pyarrow

    capsule = getattr(pyarrow.lib, "__pyx_capi__", {}).get("pyarrow_unwrap_buffer")
    if capsule is not None and PyCapsule_IsValid(capsule, SIGNATURE):
        unwrap = <fp_unwrap_t> PyCapsule_GetPointer(capsule, SIGNATURE)
        sample = pyarrow.allocate_buffer(64)
        pool_class = fp_object_of(unwrap, sample)[0]
        sample = pyarrow.py_buffer(content)
        words = fp_object_of(unwrap, sample)
        for i in range(1, WORDS - 1):
            # As a Py_buffer begins: the memory, then the object it is of
            if words[i] == <void*> PyBytes_AS_STRING(content) and words[i + 1] == <void*> content:
                exporter = i + 1
                python_class = words[0]
                break
    learned = True
    return 0


def is_frozen(buffer):
    """Whether nobody can change the memory of a pyarrow.Buffer but by breaking Arrow's own rules."""
    cdef void** words
    if not learned:
        learn()
    if unwrap == NULL:
        return False
    start, end = buffer.address, buffer.address + buffer.size
    while (parent := buffer.parent) is not None:
        buffer = parent
    if not buffer.address <= start <= end <= buffer.address + buffer.size:
        return False
    words = fp_object_of(unwrap, buffer)
    if words == NULL or pool_class == python_class:
        return False
    if words[0] == pool_class:
        return True
    return words[0] == python_class and words[exporter] != NULL and PyBytes_CheckExact(<object> words[exporter])
