/* The module. */

#include "native.h"

static PyMethodDef functions[] = {
    {"parse", parse, METH_O, NULL},
    {"nest", nest, METH_VARARGS, NULL},
    {"sweep", sweep, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Trace events to columns, nested calls, and replays.",
                                        -1, functions, NULL, NULL, NULL, NULL};

/* From Python's own, which is random in each process. */
static int
prepare_seed(void)
{
    PyObject *text = PyUnicode_FromString("torchperfd_daemon.analysis");
    Py_hash_t hash = text == NULL ? -1 : PyObject_Hash(text);
    Py_XDECREF(text);
    hash_seed = (uint64_t)hash;
    return hash == -1 ? -1 : 0;
}

static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    *kept = (PyTypeObject *)PyType_FromSpec(spec);
    return *kept == NULL ? -1 : PyModule_AddType(module, *kept);
}

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || prepare_seed() < 0 || add_type(module, &interner_spec, &interner_type) < 0
        || add_type(module, &batch_spec, &batch_type) < 0
        || PyModule_AddStringConstant(module, "ABI", NATIVE_ABI) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
