"""The ops and the module inside other libraries; each subpackage needs the library it is for."""
