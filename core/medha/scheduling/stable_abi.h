/* The part of Python's stable ABI that rows.c uses, so that it is built without Python's headers.
 *
 * The stable ABI of 3.11 (PEP 384) keeps these declarations, layouts and numbers in every later
 * version, except in builds without the global lock. test_stable_abi.py compares them with
 * Python.h where that is installed.
 */
#ifndef MEDHA_STABLE_ABI_H
#define MEDHA_STABLE_ABI_H

#include <stddef.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct PyTypeObject PyTypeObject;
typedef struct PyObject {
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
} PyObject;
#define PyObject_HEAD PyObject ob_base;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*allocfunc)(PyTypeObject *, Py_ssize_t);
typedef void (*freefunc)(void *);

typedef struct {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
#define METH_FASTCALL 0x0080

typedef struct {
    const char *name;
    int type;
    Py_ssize_t offset;
    int flags;
    const char *doc;
} PyMemberDef;
#define T_DOUBLE 4
#define T_LONGLONG 17
#define READONLY 1

typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;
#define Py_tp_alloc 47
#define Py_tp_dealloc 52
#define Py_tp_methods 64
#define Py_tp_new 65
#define Py_tp_members 72
#define Py_tp_free 74
#define Py_TPFLAGS_DEFAULT 0
#define Py_TPFLAGS_LIST_SUBCLASS (1UL << 25)
#define Py_TPFLAGS_TUPLE_SUBCLASS (1UL << 26)

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
} Py_buffer;
#define PyBUF_WRITABLE 0x0001

struct PyModuleDef {
    struct {
        PyObject ob_base;
        PyObject *(*m_init)(void);
        Py_ssize_t m_index;
        PyObject *m_copy;
    } m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    void *m_slots;
    int (*m_traverse)(PyObject *, int (*)(PyObject *, void *), void *);
    int (*m_clear)(PyObject *);
    freefunc m_free;
};
#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define PYTHON_ABI_VERSION 3
#define PyModule_Create(module) PyModule_Create2(module, PYTHON_ABI_VERSION)
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

extern PyObject _Py_NoneStruct;
extern PyTypeObject PyList_Type, PyTuple_Type;
extern PyObject *PyExc_IndexError, *PyExc_KeyError, *PyExc_TypeError, *PyExc_ValueError;

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *Py_NewRef(PyObject *);
PyObject *PyBool_FromLong(long);
void PyBuffer_Release(Py_buffer *);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
void PyErr_SetString(PyObject *, const char *);
int PyArg_ParseTuple(PyObject *, const char *, ...);
double PyFloat_AsDouble(PyObject *);
PyObject *PyFloat_FromDouble(double);
PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
PyObject *PyList_New(Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyList_Size(PyObject *);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
void *PyMem_Calloc(size_t, size_t);
void PyMem_Free(void *);
void *PyMem_Realloc(void *, size_t);
int PyModule_AddType(PyObject *, PyTypeObject *);
PyObject *PyModule_Create2(struct PyModuleDef *, int);
int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
PyObject *PySequence_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PySequence_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_New(Py_ssize_t);
PyObject *PyTuple_Pack(Py_ssize_t, ...);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyType_FromSpec(PyType_Spec *);
unsigned long PyType_GetFlags(PyTypeObject *);
void *PyType_GetSlot(PyTypeObject *, int);

#define Py_TYPE(object) (((PyObject *)(object))->ob_type)
#define Py_IS_TYPE(object, type) (Py_TYPE(object) == (type))
#define PyList_Check(object) ((PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_LIST_SUBCLASS) != 0)
#define PyTuple_Check(object) ((PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_TUPLE_SUBCLASS) != 0)
#define Py_DECREF(object) Py_DecRef((PyObject *)(object))
#define Py_XDECREF(object) Py_DecRef((PyObject *)(object)) /* does nothing with NULL */
#define Py_CLEAR(object) \
    do { \
        PyObject *cleared = (PyObject *)(object); \
        (object) = NULL; \
        Py_DecRef(cleared); \
    } while (0)
#define Py_RETURN_NONE return Py_NewRef(&_Py_NoneStruct)

#endif
