/* Calls back into Python, and whose an error is that comes out of one. */

#include "native.h"

static PyObject *is_from_script; /* of interrupts.py */

int
prepare_errors(void)
{
    PyObject *interrupts = PyImport_ImportModule("torchperfd.safety.interrupts");
    is_from_script = interrupts == NULL ? NULL : PyObject_GetAttrString(interrupts, "is_from_script");
    Py_XDECREF(interrupts);
    return is_from_script == NULL ? -1 : 0;
}

/* The error that is set, which is set no longer; NULL if there is none. */
RARE static PyObject *
take_error(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Set an error, and let go of it. */
RARE static void
set_error(PyObject *error)
{
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
}

RARE int
clear_own_error(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *error = take_error();
    PyObject *answer = PyObject_CallFunctionObjArgs(is_from_script, error, NULL);
    int is_scripts = answer == Py_True;
    Py_XDECREF(answer);
    if (is_scripts) {
        set_error(error);
        return -1;
    }
    Py_DECREF(error);
    if (answer == NULL && !PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return -1; /* a handler raised meanwhile */
    PyErr_Clear();
    return 0;
}

RARE int
call_back(PyObject *function, PyObject *argument, PyObject **result)
{
    PyObject *earlier = take_error();
    *result = PyObject_CallFunctionObjArgs(function, argument, NULL);
    if (*result == NULL && clear_own_error() < 0) {
        PyObject *newer = take_error();
        /* The earlier error is the context of the newer, as in an except clause. */
        if (earlier != NULL && earlier != newer)
            PyException_SetContext(newer, earlier);
        else
            Py_XDECREF(earlier);
        set_error(newer);
        return -1;
    }
    if (earlier != NULL)
        set_error(earlier);
    return 0;
}

RARE int
notify(PyObject *function)
{
    PyObject *result;
    if (function == NULL)
        return 0;
    Py_INCREF(function);
    int raised = call_back(function, NULL, &result);
    Py_DECREF(function);
    Py_XDECREF(result);
    return raised;
}
