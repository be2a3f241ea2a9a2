"""PrefillRouter: picks a request's workers and hands the disaggregated params over; never on the token path."""
