"""Turns MedhaReplica resources into pods placed per TP × SPP × KVP topology."""
