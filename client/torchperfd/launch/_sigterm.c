/* Has a thread of this process conclude the run before SIGTERM ends it, although the main thread may be stuck in C.

   The handler is in C for two reasons: Python runs its handlers on the main thread alone, and would show them to the
   script in signal.getsignal(). It only calls what a signal handler may call. A timer sends SIGTERM once more, so that
   the process ends in time even if no Python thread can run. */

#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "../events/native/abi.h"

/* Launchers signal a process and then its group: what comes so soon after the first one is the same request. */
#define SAME_REQUEST_NS 500000000
#define UNDELIVERED_S 1

static pid_t owner; /* the process whose run is concluded; in forked children it is another */
static sem_t arrived;
static timer_t timer;
static struct itimerspec longest;
static int64_t first_ns; /* when the first SIGTERM came; 0 before */

static void
set_default(void)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(SIGTERM, &action, NULL);
}

/* Ends the process by SIGTERM, also from a handler, in which it is blocked. */
static void
end_process(void)
{
    sigset_t set;
    set_default();
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    kill(getpid(), SIGTERM);
}

static void
on_sigterm(int number)
{
    int saved = errno;
    struct timespec now;
    int64_t now_ns, before = 0;
    if (getpid() != owner)
        end_process();
    clock_gettime(CLOCK_MONOTONIC, &now);
    now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (__atomic_compare_exchange_n(&first_ns, &before, now_ns, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        timer_settime(timer, 0, &longest, NULL);
        sem_post(&arrived);
    }
    else if (now_ns - before >= SAME_REQUEST_NS)
        end_process();
    errno = saved;
}

static int
has_handler(void)
{
    struct sigaction action;
    return sigaction(SIGTERM, NULL, &action) == 0 && action.sa_handler == on_sigterm;
}

static PyObject *
install(PyObject *module, PyObject *args)
{
    double seconds;
    struct sigaction action;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGTERM};
    if (!PyArg_ParseTuple(args, "d", &seconds))
        return NULL;
    /* The kernel does not deliver SIGTERM to the first process of a container that has no handler for it. */
    if (owner != 0 || getpid() == 1 || sigaction(SIGTERM, NULL, &action) != 0 || (action.sa_flags & SA_SIGINFO) ||
        action.sa_handler != SIG_DFL)
        Py_RETURN_FALSE;
    if (sem_init(&arrived, 0, 0) != 0 || timer_create(CLOCK_MONOTONIC, &event, &timer) != 0)
        Py_RETURN_FALSE;
    longest.it_value.tv_sec = (time_t)seconds;
    longest.it_value.tv_nsec = (long)((seconds - (double)longest.it_value.tv_sec) * 1e9);
    owner = getpid();
    action = (struct sigaction){.sa_handler = on_sigterm, .sa_flags = SA_RESTART | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    Py_RETURN_TRUE;
}

static PyObject *
release(PyObject *module, PyObject *unused)
{
    int has_arrived;
    if (has_handler())
        set_default();
    has_arrived = owner == getpid() && __atomic_load_n(&first_ns, __ATOMIC_SEQ_CST) != 0;
    if (owner == getpid() && !has_arrived) {
        timer_delete(timer);
        sem_post(&arrived);
    }
    if (!has_arrived)
        owner = 0;
    return PyBool_FromLong(has_arrived);
}

static PyObject *
wait_for_signal(PyObject *module, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS;
    while (sem_wait(&arrived) != 0)
        ;
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(__atomic_load_n(&first_ns, __ATOMIC_SEQ_CST) != 0);
}

static PyObject *
hold(PyObject *module, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS;
    for (;;)
        pause();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *
end(PyObject *module, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS;
    end_process();
    sleep(UNDELIVERED_S);
    _exit(128 + SIGTERM);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"install", install, METH_VARARGS, "Take SIGTERM over where it has its default action; see _sigterm.pyi."},
    {"release", release, METH_NOARGS, "Give it its default action back; return whether it has come before."},
    {"wait", wait_for_signal, METH_NOARGS, "Wait for SIGTERM or release(); return whether SIGTERM has come."},
    {"hold", hold, METH_NOARGS, "Wait for the end of the process."},
    {"end", end, METH_NOARGS, "End the process by SIGTERM."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sigterm", "Lets a run be concluded on SIGTERM.", -1,
                                        functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__sigterm(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "ABI", NATIVE_ABI) < 0)
        Py_CLEAR(module);
    return module;
}
