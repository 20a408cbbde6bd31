package io.perfmark;

/**
 * Traces nothing. Debian's gRPC 1.41 calls this library at every step and does not bring it along;
 * these are the methods that it calls. Only for a build with Debian's packages: elsewhere gRPC comes
 * with the real one, which does nothing either unless it is turned on.
 */
public final class PerfMark {
  private static final Tag TAG = new Tag();
  private static final Link LINK = new Link();

  private PerfMark() {}

  public static Tag createTag() {
    return TAG;
  }

  public static Tag createTag(String name) {
    return TAG;
  }

  public static Tag createTag(String name, long id) {
    return TAG;
  }

  public static void startTask(String name) {}

  public static void startTask(String name, Tag tag) {}

  public static void stopTask(String name) {}

  public static void stopTask(String name, Tag tag) {}

  public static void event(String name) {}

  public static void event(String name, Tag tag) {}

  public static Link linkOut() {
    return LINK;
  }

  public static void linkIn(Link link) {}
}
