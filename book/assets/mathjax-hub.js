// Labels of widgets typeset themselves through MathJax 2's queue; the site serves MathJax 3. This lends the
// old name to the new call. Sphinx sets window.MathJax (the configuration) before MathJax itself loads, and
// MathJax keeps what it finds there.
window.MathJax = window.MathJax || {};
window.MathJax.Hub = {
  Queue: function (command) {
    const element = command && command[2];
    if (element && window.MathJax.startup && window.MathJax.typesetPromise) {
      window.MathJax.startup.promise.then(() => window.MathJax.typesetPromise([element]));
    }
  },
  Config: function () {},
  Configured: function () {},
};
