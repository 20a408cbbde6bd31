package io.perfmark;

/** See {@link PerfMark}. */
public final class Tag {
  Tag() {}
}
