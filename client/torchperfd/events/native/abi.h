/* What the compiled modules and the Python of this version agree on: types, arguments, codes. Change it here and in
   _version.py with any of them: Python leaves a module alone that an earlier checkout has compiled. */

#define NATIVE_ABI "torchperfd-native-abi-4"
