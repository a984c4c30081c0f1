//! Tools through the API: how requests with tools, calls and results are read, and replies that call tools.

mod replies;
mod requests;
