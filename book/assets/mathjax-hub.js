// Labels of widgets have themselves typeset through MathJax 2's queue; the site serves MathJax 3. This lends the
// old name to the new call. It runs after MathJax (both are deferred, in this order) and before the widgets are
// drawn (on load). On a page without mathematics there is no MathJax, and widgets do not ask for it.
if (window.MathJax && window.MathJax.startup) {
  window.MathJax.Hub = {
    Queue: ([, , element]) =>
      window.MathJax.startup.promise.then(() => window.MathJax.typesetPromise([element])),
  };
}
