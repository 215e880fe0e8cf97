"""One file for each noun of the HTTP interface. docs/http.md lists every route with its purpose."""
