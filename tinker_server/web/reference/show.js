// Shows the description that the page holds. Nothing is sent: the page may connect to nothing.
"use strict";
SwaggerUIBundle({
  spec: JSON.parse(document.getElementById("description").textContent),
  dom_id: "#reference",
  deepLinking: false,
  supportedSubmitMethods: [],
  docExpansion: "list",
});
