/* The module. */

#include "native.h"

static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    if (kept != NULL)
        *kept = (PyTypeObject *)type;
    else
        Py_DECREF(type);
    return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                                        "The ring buffer and the hooks that write to it.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__native(void)
{
    if (prepare_errors() < 0 || prepare_hooks() < 0 || prepare_forward() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || add_type(module, &buffer_spec, &buffer_type) < 0 || add_type(module, &timed_spec, NULL) < 0
        || add_type(module, &draws_spec, &draws_type) < 0 || add_type(module, &index_lists_spec, NULL) < 0
        || add_type(module, &forward_spec, NULL) < 0
        || add_type(module, &steps_spec, NULL) < 0 || PyModule_AddStringConstant(module, "ABI", NATIVE_ABI) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
